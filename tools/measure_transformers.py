"""Measure one layer's experts of real models for docs/results/transformers.md, which tools/pages writes.

    python tools/measure_transformers.py --out results/nvidia-h200/2026-11-22-transformers.jsonl [--seconds 600]
                                         [--quick] [--eager] [--models Qwen3-30B-A3B,…] [--device cuda]

Of every model first a prefill, a single token and a training step, then other numbers of tokens. Each case is in the
file as soon as it is measured. What does not fit into the time is left out; called again with the same file, the tool
goes on with that. A failure is a record with the reason, and the exit status is 1 then. DeepSeek-V3 takes 22.5 GB of
weights, and five times that while its gradients are checked.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from expertile.integrations.transformers import register
from expertile.lab.bench.run import resumed, run
from expertile.lab.measure.environment import capture_env
from expertile.lab.measure.interleaved import device_alive, failure_of, release
from expertile.lab.operators._models import Plan
from expertile.lab.operators.transformers_layers import FIRST, MODELS, THEN, Layer, make_layer, name, operator, workload
from expertile.lab.race.case import Site


def main(argv: list[str] | None = None) -> int:
    end = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file; one that stands is gone on with")
    parser.add_argument("--seconds", type=float, default=600.0, help="when to stop")
    parser.add_argument("--models", default=",".join(m.name for m in MODELS))
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--eager", action="store_true", help="also transformers' loop over experts, forward")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(argv)
    end += options.seconds
    register()
    wanted = options.models.split(",")
    models = [model for model in MODELS if model.name in wanted]
    if len(models) != len(wanted):
        parser.error(f"--models: expected some of {', '.join(m.name for m in MODELS)}, got {options.models}")
    site = Site.current(options.device)
    return measure_all(models, options.out, end, site, options.quick, options.eager)


def measure_all(models: list[Plan], out: Path, end: float, site: Site, quick: bool, eager: bool) -> int:
    """Measure until `end` (time.monotonic). Exit status: 1 if anything failed."""
    status, device = 0, site.torch_device
    done = {record.workload for record in resumed(out, capture_env(site.device))[1] if record.status == "ok"}
    for model, cases in ((model, cases) for cases in (FIRST, THEN) for model in models):
        layer: Layer | None = None
        for case in cases:
            if f"transformers/{name(model, case)}" in done:
                continue
            left = end - time.monotonic()
            if left <= 0:
                print(f"no time left for {model.name}, {case}", file=sys.stderr)
                continue
            try:
                layer = layer or make_layer(model, device)
                for record in run(
                    [workload(layer, case)],
                    (),
                    operators=(operator(layer, case, site, eager),),
                    policies=case.policies,
                    device=device,
                    out_path=out,
                    resume=True,
                    quick=quick,
                    seconds=left,
                    seed=0,
                ):
                    status |= record.status == "failed"
            except Exception as error:
                print(f"{model.name}, {case}: {failure_of(error, device).reason}", file=sys.stderr)
                status = 1
            if not device_alive(device):
                return 1
            release(device)
            print(f"{model.name}, {case}: {end - time.monotonic():.0f} s left", file=sys.stderr)
        del layer  # before the next one is made
        release(device)
    return status


if __name__ == "__main__":
    sys.exit(main())
