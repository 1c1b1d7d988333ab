"""Measure the MoE layer for docs/results/moe.md: results/<gpu>/moe/<date>.jsonl, which tools/pages reads.

    python tools/measure_moe.py --out results/nvidia-h200/moe/2026-11-21.jsonl [--seconds 600] [--quick]
                                [--only sizes,stages,kernels] [--size T,H,I,E,k ...] [--device cuda]

Parts: whole layers beside torch's (sizes), ours by stage (stages), and what stands between the products in a CUDA graph
(kernels). The most important come first, and each is in the file as soon as it is made. What does not fit into the time
is left out; called again with the same file, the tool goes on with that. A result that is wrong, or a failure, is a
line with the reason, and the exit status is 1 then.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from expertile.device import Device
from expertile.lab.measure.interleaved import Budget, device_alive, failure_of, quick_collections
from expertile.lab.operators.moe import Size
from expertile.lab.operators.moe_kernels import SHAPES, kernels_part, measure_kernels
from expertile.lab.operators.moe_sizes import SIZES, layer_part, measure_layer
from expertile.lab.operators.moe_stages import measure_stages, stages_part
from expertile.lab.race.case import Site
from expertile.lab.race.parts import PartsFile, TimeLimit

ONLY = ("sizes", "stages", "kernels")
BUDGETS = {  # of one part, the preparations not counted
    False: {"sizes": Budget(3.0), "stages": Budget(2.0), "kernels": Budget(0.7)},
    True: {name: Budget(0.3, min_rounds=5, max_rounds=41, rel_ci=0.02) for name in ONLY},
}
Item = tuple[dict[str, Any], Callable[[], Iterator[dict[str, Any]]]]


def items(sizes: tuple[Size, ...], site: Site, limit: TimeLimit, quick: bool) -> list[Item]:
    """(which part, what makes it), the most important first: the first size whole, then what is soon done, and the
    other sizes, where compiling the rivals takes longest."""
    budgets = BUDGETS[quick]

    def once(measure: Callable[..., dict[str, Any]], *arguments: Any) -> Callable[[], Iterator[dict[str, Any]]]:
        return lambda: iter([measure(*arguments)])

    layers: list[Item] = [
        (layer_part(size), partial(measure_layer, size, site, limit, budgets["sizes"])) for size in sizes
    ]
    stages: list[Item] = [(stages_part(size), once(measure_stages, size, site, budgets["stages"])) for size in sizes]
    kernels: list[Item] = [
        (kernels_part(*shape), once(measure_kernels, *shape, site, budgets["kernels"])) for shape in SHAPES
    ]
    return [*layers[:1], *stages[:1], *kernels[:1], *stages[1:], *kernels[1:], *layers[1:]]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file; one that stands is gone on with")
    parser.add_argument("--seconds", type=float, default=600.0, help="when to stop")
    parser.add_argument("--only", default=",".join(ONLY), help=f"parts, of {','.join(ONLY)}")
    parser.add_argument("--size", action="append", help="T,H,I,E,k instead of the page's sizes; may be repeated")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(argv)
    limit = TimeLimit(options.seconds)
    only = tuple(options.only.split(","))
    if not set(only) <= set(ONLY):
        parser.error(f"--only: expected some of {', '.join(ONLY)}, got {options.only}")
    sizes = tuple(tuple(int(n) for n in text.split(",")) for text in options.size or ()) or SIZES
    if any(len(size) != 5 for size in sizes):
        parser.error(f"--size: expected T,H,I,E,k, got {options.size}")
    site = Site(Device.current(options.device), torch.device(options.device))
    file = PartsFile(options.out, site.device, ("T", "H", "I", "E", "k", "size"))
    wanted = [item for item in items(sizes, site, limit, options.quick) if item[0]["part"] in only]
    with quick_collections():
        return measure_all(wanted, file, limit, site)


def measure_all(wanted: list[Item], file: PartsFile, limit: TimeLimit, site: Site) -> int:
    """Exit status: 1 if any failed."""
    status = 0
    for part, measure in wanted:
        if file.has(part):
            continue
        if limit.left <= 0:
            print(f"no time left for {part}", file=sys.stderr)
            continue
        try:
            for made in measure():
                file.put(made)
        except Exception as error:
            reason = failure_of(error, site.torch_device).reason
            file.put({**part, "part": "failed", "of": part["part"], "reason": reason})
            print(f"{part}: {reason}", file=sys.stderr)
            status = 1
            if not device_alive(site.torch_device):
                break
        print(f"{part}: {limit.left:.0f} s left", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
