"""Measure the same workloads in two environments in turns on one device: two versions of Triton, two source trees.

    python tools/bench_in_turns.py old=PATH[:PATH] new=PATH[:PATH] --preset anchors [--preset rows …]
                                   [--only 'wgrad-*'] [--backend gluon_hopper] [--rounds 15] [--warm 4] [--out out]

A side is a name and the PYTHONPATH under which it measures. One process of each does what `expertile bench` does, but
only one of them has the device at a time: after every round, one sample of each candidate, the other takes over. Both
so meet the same clocks, power and neighbours. Records go to OUT/NAME/<gpu>/<date>-<preset>.jsonl; `expertile compare`
relates the two files workload by workload, each time divided by that of `dense` or `copy` on its own side.

--warm N: before that N processes of each side meet the workloads untimed, side by side, to fill the compile caches;
after WARM_SECONDS they are ended. A side that does not hand over within TURN_SECONDS writes its stacks to OUT/NAME.log
and is ended, and the other goes on alone.
"""

import argparse
import datetime
import faulthandler
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_TURN, _GO = b"turn\n", b"go\n"
WARM_SECONDS, TURN_SECONDS = 60.0, 90.0


def child(options: argparse.Namespace) -> int:
    """Measure on this side. Standard output says that a turn is over, standard input gives the next one."""
    say = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print goes to the log
    faulthandler.dump_traceback_later(TURN_SECONDS, exit=True)

    from expertile.cli.parts import parts
    from expertile.device import Device
    from expertile.lab.bench.config import BenchSpec
    from expertile.lab.bench.run import Event, run
    from expertile.lab.race.record import results_path

    def hand_over(event: Event) -> None:
        if options.part is None and event.kind in ("workload", "round"):
            faulthandler.cancel_dump_traceback_later()
            say.write(_TURN)
            sys.stdin.buffer.readline()
        faulthandler.dump_traceback_later(TURN_SECONDS, exit=True)

    device = Device.current()
    spec = BenchSpec(presets=tuple(options.preset), include=tuple(options.backend), only=tuple(options.only))
    for part in parts(spec, device):
        path: Path | None = results_path(device.slug, part.name, datetime.date.today().isoformat(), root=options.out)
        workloads, rounds = part.workloads, options.rounds
        if options.part is not None:
            path, rounds, workloads = None, 3, workloads[options.part :: options.warm]
        for record in run(
            workloads,
            part.backends,
            operators=part.operators,
            policies=("graph", "eager")[device.kind == "cpu" :][:1],
            out_path=path,
            rounds=rounds,
            seed=0,
            on_event=hand_over,
        ):
            if record.status not in ("ok", "unsupported"):
                print(f"{record.workload} {record.backend}: {record.status} {record.reason}", file=sys.stderr)
    return 0


def _start(
    side: str, words: Sequence[str], options: argparse.Namespace, pipe: int | None = None
) -> subprocess.Popen[bytes]:
    name, _, path = side.partition("=")
    log = options.out / f"{name}.log"
    with log.open("ab") as file:
        return subprocess.Popen(
            [sys.executable, __file__, side, *words, "--child", "--out", str(options.out / name)],
            env={**os.environ, "PYTHONPATH": path},
            stderr=file,
            stdin=pipe,
            stdout=pipe,
        )


def take_turns(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Let each run until it hands over or ends, one after the other; the turns that each had."""
    turns = [0] * len(processes)
    going = dict(enumerate(processes))
    for process in processes:  # each begins by handing over
        assert process.stdout is not None
        process.stdout.readline()
    while going:
        for i, process in list(going.items()):
            assert process.stdin is not None and process.stdout is not None
            turns[i] += 1
            try:
                process.stdin.write(_GO)
                process.stdin.flush()
                over = process.stdout.readline() != _TURN
            except BrokenPipeError:
                over = True
            if over:
                process.wait()
                del going[i]
    return turns


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sides", nargs="+", metavar="NAME=PYTHONPATH")
    parser.add_argument("--preset", action="append", required=True)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--backend", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        return child(options)
    if len(options.sides) != 2 or not all("=" in side for side in options.sides):
        parser.error(f"expected two sides NAME=PYTHONPATH, got {' '.join(options.sides)}")
    options.out.mkdir(parents=True, exist_ok=True)
    words = ["--rounds", str(options.rounds), "--warm", str(options.warm)]
    for name in ("preset", "only", "backend"):
        for value in getattr(options, name):
            words += [f"--{name}", value]
    started = time.monotonic()
    if options.warm:
        parts = [
            _start(side, [*words, "--part", str(i)], options) for side in options.sides for i in range(options.warm)
        ]
        for process in parts:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(started + WARM_SECONDS - time.monotonic(), 0.1))
            process.kill()
        print(f"warm after {time.monotonic() - started:.0f} s", flush=True)
    pipe = subprocess.PIPE
    processes = [_start(side, words, options, pipe) for side in options.sides]
    turns = take_turns(processes)
    for side, process, count in zip(options.sides, processes, turns, strict=True):
        print(f"{side.partition('=')[0]}: {count} turns, exit status {process.returncode}")
    print(f"{time.monotonic() - started:.0f} s")
    return max(abs(process.returncode) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
