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
from dataclasses import replace
from pathlib import Path

from expertile.integrations.transformers import register
from expertile.lab.bench.run import resumed
from expertile.lab.measure.env import Env, timestamp
from expertile.lab.measure.environment import capture_env
from expertile.lab.measure.interleaved import Budget, device_alive, failure_of, quick_collections, release
from expertile.lab.operators._models import Plan
from expertile.lab.operators.transformers_layers import (
    FIRST,
    MODELS,
    THEN,
    Case,
    Layer,
    implementations,
    make_layer,
    measure_case,
    name,
)
from expertile.lab.race.case import Site
from expertile.lab.race.record import Record, append

BUDGETS = {  # of one case under one policy, the preparations not counted
    False: Budget(1.0, min_rounds=9, max_rounds=101, rel_ci=0.005),
    True: Budget(0.2, min_rounds=5, max_rounds=41, rel_ci=0.02),
}


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
    with quick_collections():
        return measure_all(models, options.out, end, site, BUDGETS[options.quick], options.eager)


def measure_all(models: list[Plan], out: Path, end: float, site: Site, budget: Budget, eager: bool) -> int:
    """Measure until `end` (time.monotonic). Exit status: 1 if any case failed."""
    status, device, env = 0, site.torch_device, capture_env(site.device)
    run, held = resumed(out, env)
    done = {record.workload for record in held if record.status == "ok"}
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
                within = replace(budget, seconds=min(budget.seconds, left))
                append(out, *measure_case(layer, case, site, within, env, run, eager))
            except Exception as error:
                failure = failure_of(error, device)
                append(out, *_failed(model, case, failure.status, failure.reason, env, run, eager))
                print(f"{model.name}, {case}: {failure.reason}", file=sys.stderr)
                status = 1
                if not device_alive(device):
                    return status
            release(device)
            print(f"{model.name}, {case}: {end - time.monotonic():.0f} s left", file=sys.stderr)
        del layer  # before the next one is made
        release(device)
    return status


def _failed(model: Plan, case: Case, status: str, reason: str, env: Env, run: str, eager: bool) -> list[Record]:
    """Of a case that ended before any was timed."""
    return [
        Record(
            op="experts_train" if case.both else "experts",
            workload=f"transformers/{name(model, case)}",
            shape={"model": model.name, "tokens": case.tokens},
            dtype="bf16",
            backend=backend,
            policy="eager",
            status=status,
            reason=reason,
            env=env,
            run=run,
            date=timestamp(),
        )
        for backend in implementations(case, eager)
    ]


if __name__ == "__main__":
    sys.exit(main())
