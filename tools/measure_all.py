"""Measure what the pages show, on all GPUs of this machine at once, in a limited time.

    python tools/measure_all.py [JOB …] [--out out] [--seconds 3600] [--warm 8] [--list]

A job is a preset of `expertile bench` (under a CUDA graph, some also or only eagerly, quickly), `transformers` or
`parallel` for the tools that measure those, or `auto` for `expertile tune --verify`. Without names all are done, in the
order of `--list`. Each GPU takes the next job when it is free; `parallel`, which wants them all, waits for the others
to end. What a job has measured is kept when time runs out; the same command goes on with what is left (`--resume` of
bench, the same file of the tools). A preset that names no workload within a minute and a half is begun once more.

--warm N: before a preset is timed, N processes meet its workloads once, side by side and untimed, so that what has to
be compiled is in the caches. That is worth it where torch.compile is among the rivals: it compiles for every shape.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import IO

# The most telling first. Those with torch.compile among the rivals are marked.
PRESETS = (
    *("anchors", "moe*", "moe-stages", "moe-routing", "gradients", "moe-decode*", "moe-sonic*", "fp8-sweep*"),
    *("fp8-large*", "fp8-random", "fp8-causes", "int4-models*", "rows*", "attention", "skew", "scaling", "quantize*"),
    *("softmax-v100*", "layernorm-v100*", "attention-v100*", "laplacian*", "add-scalar*"),
    *("models", "squares", "moe-ffn", "cpu", "ladder"),
)
# Whose pages show calls from Python, as well or alone; a busy host would show in those.
POLICIES = {"fp8-sweep": "both", "fp8-causes": "both", "moe": "eager", "moe-stages": "eager"}
MEMORY = ("moe",)  # whose page shows peak memory
TOOLS = {"transformers": ["tools/measure_transformers.py"], "parallel": ["-m", "tools.parallel"]}  # what Python runs
AUTO = "auto"
_PROBLEMS = 200  # that auto is asked about
ALL = (*(p.rstrip("*") for p in PRESETS), "transformers", AUTO, "parallel")
# Seconds until bench has named its first workload, which takes it ten: on an H200 one process never came to it, and the
# same command did so at once afterwards.
_SILENT_SECONDS = 90.0
ROOT = Path(__file__).parents[1]
_WARM = """
import sys
from expertile.lab import operators
from expertile.lab.bench.presets import workloads_for
from expertile.lab.bench.run import run
from expertile.ops.grouped_mm.backends import BACKENDS
preset, part, parts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
# quack would tune itself beside its rivals, and remember what it found then.
backends = tuple(b for b in BACKENDS if b.name != "quack")
for workload in workloads_for([preset])[part::parts]:
    for _ in run([workload], backends, operators=tuple(operators.operators().values()), policies=("graph",),
                 quick=True, rounds=3):
        pass
"""


def commands(job: str, out: Path, seconds: float, warm: int) -> list[list[list[str]]]:
    """What a job runs: steps one after the other, each of commands side by side."""
    python = [sys.executable]
    if job in TOOLS:
        file = out / f"{job}.jsonl"
        return [[[*python, *TOOLS[job], "--out", str(file), "--seconds", f"{seconds:.0f}"]]]
    if job == AUTO:
        words = [*python, "-m", "expertile", "tune", "--verify", str(_PROBLEMS), "--minutes", f"{seconds / 60:.2f}"]
        return [[[*words, "--resume", "--out", str(out)]]]
    policy = POLICIES.get(job, "graph")
    bench = [*python, "-m", "expertile", "bench", "--preset", job, "--policy", policy, "--quick", "--no-html"]
    bench += ["--memory"] * (job in MEMORY)
    steps = [[[*bench, "--resume", "--out", str(out)]]]
    if warm and f"{job}*" in PRESETS:
        steps.insert(0, [[*python, "-c", _WARM, job, str(i), str(warm)] for i in range(warm)])
    return steps


def run_job(job: str, gpus: str, end: float, out: Path, warm: int) -> str:
    """Run one job on the GPUs numbered `gpus`, until it ends or it is `end` (time.monotonic); its output goes to
    OUT/logs/JOB.log. What became of it."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus, "OMP_NUM_THREADS": "4"}
    # Each of them would start a compiling process for every core, beside those of the jobs on other GPUs.
    environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    started, codes = time.monotonic(), [0]
    (out / "logs").mkdir(parents=True, exist_ok=True)
    with (out / "logs" / f"{job}.log").open("ab") as log:

        def begin(words: Sequence[str]) -> subprocess.Popen[bytes]:
            return subprocess.Popen(words, cwd=ROOT, env=environment, stdout=log, stderr=log)

        steps = commands(job, out, max(end - started - 10, 1), warm)
        for step in steps:
            here = [begin(c) for c in step]
            if step is steps[-1] and job not in (*TOOLS, AUTO) and _silent(here[0], log, end):
                here[0].kill()
                here[0].wait()
                here = [begin(c) for c in step]
            codes = []
            for process in here:
                try:
                    codes.append(process.wait(max(end - time.monotonic(), 0.1)))
                except subprocess.TimeoutExpired:
                    process.kill()
                    codes.append(process.wait())
    late = time.monotonic() >= end
    how = "time is up" if late else "done" if not any(codes) else f"failed, see {out / 'logs' / job}.log"
    outcome = f"{how} ({time.monotonic() - started:.0f} s on GPU {gpus})"
    print(f"{job}: {outcome}", flush=True)
    return outcome


def _silent(process: subprocess.Popen[bytes], log: IO[bytes], end: float) -> bool:
    """Whether it has written nothing for `_SILENT_SECONDS`, as soon as that is known."""
    size, until = os.fstat(log.fileno()).st_size, min(time.monotonic() + _SILENT_SECONDS, end)
    while time.monotonic() < until:
        if process.poll() is not None or os.fstat(log.fileno()).st_size > size:
            return False
        time.sleep(0.2)
    return time.monotonic() < end


def measure(jobs: Sequence[str], gpus: Sequence[str], out: Path, seconds: float, warm: int) -> dict[str, str]:
    """Run the jobs, one on each GPU at a time; what became of each that was begun."""
    end = time.monotonic() + seconds
    outcomes: dict[str, str] = {}
    idle: SimpleQueue[str] = SimpleQueue()
    for gpu in gpus:
        idle.put(gpu)

    def on_next_gpu(job: str) -> None:
        if time.monotonic() < end:
            gpu = idle.get()
            outcomes[job] = run_job(job, gpu, end, out, warm)
            idle.put(gpu)

    with ThreadPoolExecutor(len(gpus)) as threads:
        list(threads.map(on_next_gpu, (job for job in jobs if job != "parallel")))
    if "parallel" in jobs and time.monotonic() < end:
        outcomes["parallel"] = run_job("parallel", ",".join(gpus), end, out, warm)
    return outcomes


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("jobs", nargs="*", help="presets, or transformers, auto, parallel; all by default")
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--seconds", type=float, default=3600.0, help="when to stop")
    parser.add_argument("--warm", type=int, default=8, help="processes that compile beforehand; 0: none")
    parser.add_argument("--list", action="store_true", help="name the jobs and stop")
    options = parser.parse_args(argv)
    if options.list:
        print("\n".join(ALL))
        return 0
    if unknown := [job for job in options.jobs if job not in ALL]:
        parser.error(f"no job called {', '.join(unknown)}; --list names them")

    import torch

    count = torch.cuda.device_count()
    if not count:
        parser.error("there is no CUDA GPU here")
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    jobs = [j for j in options.jobs or ALL if j != "parallel" or count > 1]
    outcomes = measure(jobs, gpus, options.out.absolute(), options.seconds, options.warm)
    for job in (j for j in jobs if j not in outcomes):
        print(f"{job}: no time left")
    return 0 if all("failed" not in o for o in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
