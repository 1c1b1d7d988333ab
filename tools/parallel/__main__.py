"""Measure expert parallelism on the GPUs of this machine, in a limited time; records are kept as they are made.

    python -m tools.parallel [--out out/parallel.jsonl] [--ranks 2] [--seconds 110] [--quick] [--device cuda]
                             [--only large,qwen,decode]

Ours against one GPU and against plain torch, and its parts alone. A process for each GPU, NCCL between them. With
`--device cpu`: tiny sizes over gloo, which shows that all of it runs. The exit status is 0 if something was timed and
nothing was wrong or failed. `tools/pages` shows a record in docs/results/parallel.md once it lies in
results/<gpu>/<date>-parallel-<ranks>-gpus.jsonl.
"""

import argparse
import sys
import time
from pathlib import Path


def main(argv: list[str] | None = None) -> int:
    started = time.monotonic()  # before torch is imported, which counts
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("out/parallel.jsonl"))
    parser.add_argument("--ranks", type=int, default=2, help="GPUs at most")
    parser.add_argument("--seconds", type=float, default=110.0, help="time limit in all, compiling included")
    parser.add_argument("--quick", action="store_true", help="fewer ways, sizes and rounds")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only",
        type=lambda text: tuple(text.split(",")),
        default=(),
        help="some of large, qwen, decode, with commas between; all by default",
    )
    options = parser.parse_args(argv)

    from tools.parallel.launch import launch
    from tools.parallel.run import Options

    return launch(Options(**vars(options)), started)


if __name__ == "__main__":
    sys.exit(main())
