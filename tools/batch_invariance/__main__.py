"""Look for a token whose bits depend on its batch, and measure what batch invariance costs.

    python -m tools.batch_invariance --cases 10000 --seconds 60 --out FILE.json [--first 0] [--device cuda]
                                     [--only configs,fuzz,cost] [--processes 10]

configs  Every batch-invariant config of every backend on a few problems: all must give the bits of the first.
fuzz     Random layers and products. Each has a pool of tokens, computed once as one batch; a case takes some of them,
         in another order, number or neighbourhood, and compares every bit with the pool's. Numbers of tokens are even
         on a logarithmic scale. Every 16th case with a gradient compares that of x too. A case is told by its number:
         `--first N --cases 1` repeats it.
cost     Layers and products, batch-invariant and not, in turn, by CUDA graph: median of the ratios of the rounds.

On a GPU processes of their own compile the configs first, and fuzz side by side; `--seconds` limits the fuzz, compiling
included. FILE is written after each part. The exit status is 1 if bits differ.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from expertile.device import Device
from expertile.lab.measure.env import timestamp
from expertile.lab.measure.environment import capture_env
from tools.batch_invariance.configs import compile_first, configs
from tools.batch_invariance.cost import cost
from tools.batch_invariance.fuzz import fuzz

PARTS = ("configs", "fuzz", "cost")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cases", type=int, default=10000)
    parser.add_argument("--seconds", type=float, default=60.0, help="limit of the fuzz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, of {','.join(PARTS)}")
    parser.add_argument("--rounds", type=int, default=25, help="of the cost")
    parser.add_argument("--processes", type=int, default=10, help="side by side, on a GPU; 0: none")
    parser.add_argument("--compile-seconds", type=float, default=150.0, help="limit of compiling the configs first")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(argv)
    only = options.only.split(",")
    if not set(only) <= set(PARTS):
        parser.error(f"--only: expected some of {', '.join(PARTS)}, got {options.only}")
    device = torch.device(options.device)
    small = device.type != "cuda"
    found: dict[str, Any] = {
        "date": timestamp(),
        "env": asdict(capture_env(Device.current(device))),
        "arguments": vars(options) | {"out": str(options.out)},
    }

    def write() -> None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=1) + "\n")

    if "configs" in only and not small and options.processes:
        found["compile_s"] = compile_first(options.processes, options.compile_seconds)
        print(f"compiled in {found['compile_s']:.0f} s", flush=True)
    bad = 0
    if "configs" in only:
        found["configs"] = configs(device, small)
        wrong = [line for line in found["configs"] if line.get("differing") or "error" in line]
        bad += len(wrong)
        print(f"configs: {len(found['configs'])} ran, {len(wrong)} differ or failed", flush=True)
        write()
    if "fuzz" in only:
        processes = 0 if small else options.processes
        found["fuzz"] = result = fuzz(device, small, options.first, options.cases, options.seconds, processes)
        bad += result["num_failures"] + len(result["errors"])
        print(
            f"fuzz: {result['cases']} cases of {result['pools']} layers and products in {result['seconds']:.0f} s, "
            f"{result['num_failures']} differ, {len(result['errors'])} raised",
            flush=True,
        )
        write()
    if "cost" in only:
        found["cost"] = cost(device, small, options.rounds)
        for line in found["cost"]:
            print(line["name"], f"{line['ratio']:.3f}" if "ratio" in line else line["error"], flush=True)
    write()
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
