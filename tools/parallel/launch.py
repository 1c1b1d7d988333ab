"""A process for each GPU, and an end to all of them when the time is up, whatever they are doing."""

import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from expertile.lab.race.record import append, read
from tools.parallel.run import Options, jobs, run
from tools.parallel.team import Team

_COLLECTIVE_S = 60.0  # after which a collective is given up
_LAST_S, _EXIT_S = 4.0, 1.5  # before the limit: nothing new is begun; a rank that still runs ends itself
_AFTER_ANOTHER_S = 5.0  # a rank may go on for so long when another one has failed
_OUT_OF_TIME = 4  # exit status of a rank that ended itself


def launch(options: Options, started: float | None = None) -> int:
    """Measure on at most `options.ranks` GPUs (or as many processes on a CPU), and end `options.seconds` after
    `started` (time.monotonic; now by default) at the latest. 0 if something was timed and nothing was wrong or failed.
    ValueError without a GPU, where GPUs are asked for, and for sizes that `jobs` does not have."""
    jobs(options)
    started = time.monotonic() if started is None else started
    world = options.ranks
    if options.device == "cuda":
        world = min(world, torch.cuda.device_count())
        if world < 1:
            raise ValueError("device: expected a CUDA GPU, got none; --device cpu runs tiny sizes")
    # Multicast over NVLink needs rights to the fabric that machines sharing their GPUs do not give, and a program that
    # tries it there can take the GPUs down. One thread compiles the few kernels of torch.compile: no pool is started.
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("")
    with tempfile.TemporaryDirectory() as folder:
        codes = _ranks(world, options, folder, started)
    statuses = Counter(record.status for record in read(options.out))
    print(f"{options.out}: {dict(statuses)}, ranks ended with {codes}", flush=True)
    return 0 if statuses["ok"] and not statuses["wrong"] + statuses["failed"] and not any(codes) else 1


def _ranks(world: int, options: Options, folder: str, started: float) -> list[int | None]:
    """Exit codes of the ranks, all of which have ended."""
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=rank_main, args=(rank, world, options, folder, started), daemon=True)
        for rank in range(world)
    ]
    for process in ranks:
        process.start()
    end = started + options.seconds
    while any(p.is_alive() for p in ranks) and time.monotonic() < end:
        if any(p.exitcode for p in ranks):
            end = min(end, time.monotonic() + _AFTER_ANOTHER_S)
        time.sleep(0.05)
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join(5)
    return [process.exitcode for process in ranks]


def rank_main(rank: int, world: int, options: Options, folder: str, started: float) -> None:
    """The process of one rank, which ends in time even if it hangs in a collective."""
    limit = started + options.seconds
    watch = threading.Timer(max(0.1, limit - _EXIT_S - time.monotonic()), os._exit, [_OUT_OF_TIME])
    watch.daemon = True
    watch.start()
    code = 0
    try:
        _measure(rank, world, options, folder, started)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not in order: NCCL would wait for a rank that ended, and for graphs that hold its communicators.
    os._exit(code)


def _measure(rank: int, world: int, options: Options, folder: str, started: float) -> None:
    gpu = options.device == "cuda"
    device = torch.device("cuda", rank) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/rendezvous", world)
    dist.init_process_group(
        "nccl" if gpu else "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=min(_COLLECTIVE_S, options.seconds)),
        device_id=device if gpu else None,
    )
    team = Team(rank, world, device, store, started, started + options.seconds - _LAST_S)
    run(team, options, partial(append, options.out) if rank == 0 else lambda record: None)
    team.gather("done")  # no rank leaves, and takes the group along, before all are done
