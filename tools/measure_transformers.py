"""Measure one layer's experts of real models for docs/results/transformers.md: results/<gpu>/transformers/<date>.jsonl,
which tools/pages reads.

    python tools/measure_transformers.py --out results/nvidia-h200/transformers/2026-11-22.jsonl [--seconds 600]
                                         [--quick] [--eager] [--models Qwen3-30B-A3B,…] [--device cuda]

Of every model first a prefill, a single token and a training step, then other numbers of tokens; each figure is in the
file as soon as it is made. What does not fit into the time is left out; called again with the same file, the tool goes
on with that. A failure is a line with the reason, and the exit status is 1 then. DeepSeek-V3 takes 22.5 GB of weights,
and five times that while its gradients are checked.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import torch

from expertile.device import Device
from expertile.integrations.transformers import register
from expertile.lab.measure.interleaved import Budget, device_alive, failure_of, quick_collections, release
from expertile.lab.operators.transformers_layers import (
    FIRST,
    MODELS,
    THEN,
    Layer,
    Model,
    layer_part,
    make_layer,
    measure_case,
    policies,
)
from expertile.lab.race.case import Site
from expertile.lab.race.parts import PartsFile, TimeLimit

BUDGETS = {  # of one case under one policy, the preparations not counted
    False: Budget(1.0, min_rounds=9, max_rounds=101, rel_ci=0.005),
    True: Budget(0.2, min_rounds=5, max_rounds=41, rel_ci=0.02),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSONL file; one that stands is gone on with")
    parser.add_argument("--seconds", type=float, default=600.0, help="when to stop")
    parser.add_argument("--models", default=",".join(m.name for m in MODELS))
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--eager", action="store_true", help="also transformers' loop over experts, forward")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(argv)
    import transformers

    limit = TimeLimit(options.seconds)
    register()
    wanted = options.models.split(",")
    models = [model for model in MODELS if model.name in wanted]
    if len(models) != len(wanted):
        parser.error(f"--models: expected some of {', '.join(m.name for m in MODELS)}, got {options.models}")
    site = Site(Device.current(options.device), torch.device(options.device))
    file = PartsFile(
        options.out, site.device, ("model", "tokens", "both", "policy"), transformers=transformers.__version__
    )
    with quick_collections():
        return measure_all(models, file, limit, site, BUDGETS[options.quick], options.eager)


def measure_all(models: list[Model], file: PartsFile, limit: TimeLimit, site: Site, budget: Budget, eager: bool) -> int:
    """Exit status: 1 if any case failed."""
    status = 0
    for model, cases in ((model, cases) for cases in (FIRST, THEN) for model in models):
        layer: Layer | None = None
        for case in cases:
            parts = [layer_part(model, case, policy) for policy in policies(case, site.torch_device)]
            if all(file.has(part) for part in parts):
                continue
            if limit.left <= 0:
                print(f"no time left for {model.name}, {case}", file=sys.stderr)
                continue
            try:
                layer = layer or make_layer(model, site.torch_device)
                within = replace(budget, seconds=min(budget.seconds, limit.left))
                for part in measure_case(layer, case, site, within, eager):
                    file.put(part)
            except Exception as error:
                reason = failure_of(error, site.torch_device).reason
                file.put({**parts[0], "part": "failed", "of": "layer", "reason": reason})
                print(f"{model.name}, {case}: {reason}", file=sys.stderr)
                status = 1
                if not device_alive(site.torch_device):
                    return status
            release(site.torch_device)
            print(f"{model.name}, {case}: {limit.left:.0f} s left", file=sys.stderr)
        del layer  # before the next one is made
        release(site.torch_device)
    return status


if __name__ == "__main__":
    sys.exit(main())
