"""Measure one layer's experts of real models for docs/results/transformers.md, which tools/pages writes.

    python tools/measure_transformers.py --out results/nvidia-h200/2026-11-22-transformers.jsonl [--seconds 600]
                                         [--quick] [--eager] [--models Qwen3-30B-A3B,…] [--device cuda]

Of every model first a prefill, a single token and a training step, then other numbers of tokens. Each case is in the
file as soon as it is measured. What does not fit into the time is left out; called again with the same file, the tool
goes on with that. A failure is a record with the reason, and the exit status is 1 then. DeepSeek-V3 takes 22.5 GB of
weights, and five times that while its gradients are checked.

What is called is the experts module of transformers' model class, with random weights in bfloat16, on expertile and on
transformers' own implementations: operators "experts" (forward) and "experts_train" (forward and backward). Ids and
routing weights are what the model's own router gives random tokens; they differ from one set of inputs to the next.
With R = T k rows, a forward pass takes 6 R H I FLOPs and moves at least the weights of the experts that have tokens, x
and out; with the backward pass it is 18 R H I, and also dy, dx and the gradients of all weights.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertile.integrations.transformers import register
from expertile.lab.bench.run import resumed, run
from expertile.lab.measure.environment import capture_env
from expertile.lab.measure.interleaved import device_alive, failure_of, release
from expertile.lab.operators._binds import with_gradients
from expertile.lab.operators._models import BATCHED_TOKENS, GPT_OSS, QWEN3, Plan, build, named_experts
from expertile.lab.operators.moe import by_expert
from expertile.lab.race.case import Site, set_count
from expertile.lab.race.operator import ROUNDOFF, Operator, Rival, Workload
from expertile.roofline import Work

Inputs = tuple[Tensor, ...]  # x [T, H], ids [T, k], weights [T, k], and dy [T, H] with a backward pass
OURS = "expertile"
_FEW_SETS = 16
_GRADIENTS = 4.0  # times the weights, while those of two implementations are held against the reference
# As `operators.moe.tolerance`: pre-activation, activation, y and out are rounded, and so are their gradients. Backward
# transformers' own may err twice as much: they add the gradients of biases in bfloat16, row after row.
_TOLERANCE = (4 * ROUNDOFF["bf16"], 12 * ROUNDOFF["bf16"])
_OTHERS_BACKWARD = (8 * ROUNDOFF["bf16"], 24 * ROUNDOFF["bf16"])

MODELS = (
    QWEN3,
    Plan(
        "Mixtral-8x7B",
        "Mixtral",
        dict(hidden_size=4096, intermediate_size=14336, num_local_experts=8, num_experts_per_tok=2),
    ),
    Plan(
        "DeepSeek-V3",
        "DeepseekV3",
        dict(
            hidden_size=7168,
            moe_intermediate_size=2048,
            n_routed_experts=256,
            num_experts_per_tok=8,
            n_group=8,
            topk_group=4,
            norm_topk_prob=True,
            routed_scaling_factor=2.5,
            first_k_dense_replace=0,
        ),
    ),
    GPT_OSS,
)


@dataclass(frozen=True)
class Case:
    """What is measured of a layer: `both` forward and backward, under which policies of the lab's timers."""

    tokens: int
    both: bool = False
    policies: tuple[str, ...] = ("eager", "graph")


FIRST = (Case(2048, policies=("eager",)), Case(1), Case(4096, both=True, policies=("eager",)))
THEN = (Case(16), Case(128), Case(8192, policies=("eager",)))


@dataclass(frozen=True)
class Layer:
    """The block of router and experts, and the experts in it."""

    model: Plan
    block: Any
    experts: Any

    @property
    def sizes(self) -> tuple[int, int, int]:
        """(H, I, E)."""
        down = self.experts.down_proj
        experts, hidden, intermediate = down.transpose(1, 2).shape if self.experts.is_transposed else down.shape
        return int(hidden), int(intermediate), int(experts)

    def runs(self, implementation: str) -> Any:
        """The experts, with the same weights, as `experts_implementation=implementation` runs them."""
        other = copy.copy(self.experts)
        other.config = copy.copy(self.experts.config)
        other.config._experts_implementation = implementation
        return other


def make_layer(plan: Plan, device: torch.device, seed: int = 0) -> Layer:
    """Of a model with one layer and random weights."""
    one = replace(plan, options={**plan.options, "num_hidden_layers": 1, "vocab_size": 32})
    model = build(one, device, seed)
    ((name, experts),) = named_experts(model)
    return Layer(plan, model.get_submodule(name.rpartition(".")[0]), experts)


class _Reached(Exception):
    """Carries what the experts were called with."""


def make_inputs(layer: Layer, tokens: int, both: bool, seed: int) -> Inputs:
    """x is normal; ids and weights are what the model's block hands to its experts."""
    device = layer.experts.down_proj.device
    generator = torch.Generator(device).manual_seed(seed)
    shape = (tokens, layer.sizes[0])
    x, *dy = (torch.randn(shape, device=device, generator=generator, dtype=torch.bfloat16) for _ in range(1 + both))

    def stop(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _Reached(*args, *kwargs.values())

    hook = layer.experts.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with torch.no_grad():
            layer.block(x[None])
    except _Reached as reached:
        _, ids, weights = reached.args
    finally:
        hook.remove()
    return (x, ids, weights, *dy)


def reference(layer: Layer, inputs: Inputs) -> tuple[Tensor, ...]:
    """In float32: out and, if `inputs` end in dy, the gradients of x, routing weights and all parameters of the
    experts."""
    x, ids, weights, *dy = inputs
    experts, named = layer.experts, dict(layer.experts.named_parameters())

    def expert(_: int, rows: Tensor, *own: Tensor) -> Tensor:
        weights = dict(zip(named, own, strict=True))

        def product(x: Tensor, name: str) -> Tensor:
            out = x @ (weights[name] if experts.is_transposed else weights[name].t())
            return out + weights[f"{name}_bias"] if experts.has_bias else out

        return product(experts._apply_gate(product(rows, "gate_up_proj")), "down_proj")

    return by_expert(expert, x, ids, weights, tuple(named.values()), *dy)


def work(layer: Layer, inputs: Inputs) -> Work:
    """Of a forward pass, or with dy also of the backward pass."""
    x, ids, weights, *dy = inputs
    hidden, intermediate, experts = layer.sizes
    each = sum(p.numel() for p in layer.experts.parameters()) // experts
    elements = 2 * x.numel() + int(ids.unique().numel()) * each
    if dy:
        elements += 2 * x.numel() + experts * each
    routing = ids.numel() * (ids.element_size() + weights.element_size())
    return Work((18.0 if dy else 6.0) * ids.numel() * hidden * intermediate, float(2 * elements + routing))


def implementations(case: Case, eager: bool = False) -> tuple[str, ...]:
    """Who is called: ours and transformers' own, "eager" only if wanted and forward, since its backward pass writes
    zeros of all weights for every expert."""
    found = (OURS, "grouped_mm")
    if case.both:
        return found
    return (*found, *(("batched_mm",) if case.tokens <= BATCHED_TOKENS else ()), *(("eager",) if eager else ()))


def _bind(experts: Any, inputs: Inputs) -> Callable[[], tuple[Tensor, ...]]:
    x, ids, weights, *dy = inputs
    if not dy:
        return lambda: (experts(x, ids, weights),)
    leaves = (x.detach().requires_grad_(), weights.detach().requires_grad_(), *experts.parameters())
    return with_gradients(lambda: experts(leaves[0], ids, leaves[1]), leaves, dy[0])


def workload(layer: Layer, case: Case) -> Workload:
    """The call that a case makes of a layer."""
    hidden, intermediate, experts = layer.sizes
    sizes = {"hidden": hidden, "intermediate": intermediate, "experts": experts}
    top_k = layer.experts.config.num_experts_per_tok
    dims: dict[str, Any] = {"model": layer.model.name, "tokens": case.tokens, **sizes, "top_k": top_k}
    op = "experts_train" if case.both else "experts"
    return Workload(name(layer.model, case), "transformers", op, tuple(dims.items()), "bf16")


def name(model: Plan, case: Case) -> str:
    """How records call a case, without the preset."""
    return f"{model.name}-T{case.tokens}{'-train' * case.both}"


def operator(layer: Layer, case: Case, site: Site, eager: bool = False) -> Operator:
    """That call as an operator of the lab, whose work is the least of the sets of inputs from seed 0 on."""
    import transformers

    def inputs(w: Workload, device: torch.device, seed: int) -> Inputs:
        return make_inputs(layer, case.tokens, case.both, seed)

    def rival(name: str) -> Rival:
        experts, tolerance = layer.runs(name), _OTHERS_BACKWARD if case.both and name != OURS else _TOLERANCE
        own = Rival(name, lambda w, inputs: _bind(experts, inputs), peer=name != OURS, graph=name != "eager")
        return replace(own, tolerance=lambda w: tolerance, config={"transformers": transformers.__version__})

    works = [work(layer, make_inputs(layer, case.tokens, case.both, 0))]
    for seed in range(1, min(set_count(int(works[0].nbytes), site), _FEW_SETS)):
        works.append(work(layer, make_inputs(layer, case.tokens, case.both, seed)))
    least = min(works, key=lambda w: w.nbytes)
    checked = _GRADIENTS * sum(p.nbytes for p in layer.experts.parameters()) if case.both else 0
    return Operator(
        workload(layer, case).op,
        inputs,
        lambda w, inputs: reference(layer, inputs),
        lambda w: least,
        tuple(map(rival, implementations(case, eager))),
        lambda w: _TOLERANCE,
        memory_nbytes=lambda w: checked,
    )


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
