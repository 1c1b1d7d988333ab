"""Which definitions expertile serves: known by their op_type and the names of their inputs."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from expertile.lab.flashinfer import served
from expertile.lab.flashinfer.definition import Definition, Task
from expertile.lab.race.gate import limits
from expertile.roofline import Work

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """Definitions that one function of `served` computes.

    - `inputs`: all of theirs but `optional`. Those in `fixed` say how rows are distributed: they are the same in every
      set of inputs, so that `work` is known.
    - `constants`: what a definition says to the function beside its inputs.
    - `arranged`: rearranges the weights, as a server does when it loads them.
    - `capturable`: the reference may run in a CUDA graph.
    """

    compute: Callable[..., Tensor]
    inputs: frozenset[str]
    work: Callable[[Task, Inputs], Work]
    tolerance: Callable[[Task], tuple[float, float]]
    constants: Callable[[Definition], Mapping[str, Any]] = lambda definition: {}
    optional: frozenset[str] = frozenset()
    fixed: frozenset[str] = frozenset()
    arranged: Callable[[Inputs], Inputs] | None = None
    capturable: bool = False

    def fixed_inputs(self, task: Task) -> Inputs:
        """Those in `fixed`, on the CPU. Random logits of 16 bits are made different: the choice is no one's among equal
        ones, and of 128 experts many a token has some at the edge of its top-k."""
        made = task.make(self.fixed, torch.device("cpu"), 0)
        logits = made.get("routing_logits")
        if logits is not None and logits.itemsize == 2 and task.is_random("routing_logits"):
            ranks, experts = logits.argsort(dim=1, stable=True).argsort(dim=1), logits.shape[1]
            step = 2.0 ** -max(4, math.ceil(math.log2(experts / 8)))  # within ±4: bfloat16 tells 512 experts apart
            made["routing_logits"] = ((ranks - experts // 2) * step).to(logits.dtype)
        return made


def kind_of(definition: Definition) -> Kind:
    """The kind that serves `definition`, its function with the constants. ValueError says why none does."""
    if definition.op_type not in KINDS:
        raise ValueError(f"expertile serves {', '.join(KINDS)}, not {definition.op_type}")
    names = definition.inputs.keys()
    for kind in KINDS[definition.op_type]:
        if kind.inputs <= names and names <= kind.inputs | kind.optional:
            return replace(kind, compute=partial(kind.compute, **kind.constants(definition)))
    raise ValueError(f"expertile has no {definition.op_type} of {', '.join(definition.inputs)}")


def _product_work(task: Task, fixed: Inputs) -> Work:
    """C of A [M, K] or [G, M, K], and B; with offs, weights of groups without rows are not read."""
    *rows, k = task.shape("A")
    idle, count = 0, float(torch.Size(rows).numel())
    if "offs" in fixed:
        offs = [0, *fixed["offs"].tolist()]
        count = offs[-1]
        idle = task.nbytes("B") // (len(offs) - 1) * sum(a >= b for a, b in pairwise(offs))
    return Work(2.0 * count * k * task.shape("C")[-1], float(task.nbytes() - idle))


def _moe_work(task: Task, ids: Tensor, weights: tuple[str, ...], tokens: tuple[str, ...], unread: int = 0) -> Work:
    """Of the experts from 0 on that this rank has: their rows, the weights of those with rows, tokens that have one.
    The last of `weights` is the second projection [E, H, I]."""
    local, hidden, inner = task.shape(weights[-1])
    here = (ids >= 0) & (ids < local)
    used, busy = len(torch.unique(ids[here])), int(here.any(1).sum())
    idle = sum(map(task.nbytes, weights)) // local * (local - used) + unread
    idle += sum(map(task.nbytes, tokens)) // max(len(ids), 1) * (len(ids) - busy)
    return Work(6.0 * int(here.sum()) * hidden * inner, float(task.nbytes() - idle))


def _fp8_work(task: Task, fixed: Inputs) -> Work:
    bias = fixed.get("routing_bias")
    ids, _ = served.routed(fixed["routing_logits"], bias, 1.0, **_routing(task.definition))
    weights = ("gemm1_weights", "gemm1_weights_scale", "gemm2_weights_scale", "gemm2_weights")
    return _moe_work(task, ids - fixed.get("local_expert_offset", 0), weights, ("hidden_states", "hidden_states_scale"))


def _routed_work(task: Task, fixed: Inputs) -> Work:
    unread = task.nbytes("gating_output")  # nothing is computed from it
    return _moe_work(task, fixed["topk_ids"], ("w1", "w2"), ("hidden_states",), unread)


def _routing(definition: Definition) -> Mapping[str, Any]:
    """top_k, groups, top_groups: of axes, or of the name (`…_topk8_ng8_kg4_…`)."""
    found: dict[str, int] = {}
    for key, axes, mark in (
        ("top_k", ("top_k",), "topk"),
        ("groups", ("n_group", "n_groups"), "ng"),
        ("top_groups", ("topk_group",), "kg"),
    ):
        by_name = re.search(rf"_{mark}(\d+)(_|$)", definition.name)
        by_axis = [value for axis in axes if (value := definition.axes.get(axis))]
        if by_axis or by_name:
            found[key] = by_axis[0] if by_axis else int(by_name[1])  # type: ignore[index]
    if "top_k" not in found:
        raise ValueError(f"expected an axis top_k, or a name with topk, got {definition.name}")
    return found


def _stored(definition: Definition) -> Mapping[str, Any]:
    """How the weights of a grouped product lie: [G, N, K] or [G, K, N]."""
    last, k = definition.inputs["B"]["shape"][-1], definition.inputs["A"]["shape"][-1]
    return {"stored": "nk" if last == k else "kn"}


def _product_limits(task: Task) -> tuple[float, float]:
    """Twice the lab's limits of a product: a reference that takes no float32 rounds its result as well."""
    keys = {torch.float32: "fp32", torch.float16: "fp16"}
    rel, worst = limits(keys.get(task.dtype("A"), "bf16"), task.dtype("C"), task.shape("A")[-1])
    return 2 * rel, 2 * worst


def _gate_first(*names: str) -> Callable[[Inputs], Inputs]:
    def swap(x: Tensor) -> Tensor:
        return served.swapped(x.view(torch.uint8) if x.itemsize == 1 else x, 1).view(x.dtype)

    return lambda inputs: {**inputs, **{name: swap(inputs[name]) for name in names}, "gate_first": True}


_AB = frozenset("AB")
_OFFS = frozenset(("offs",))
_SCALARS = frozenset(("routing_bias", "local_expert_offset", "routed_scaling_factor"))
_FP8 = "hidden_states hidden_states_scale gemm1_weights gemm1_weights_scale gemm2_weights gemm2_weights_scale"
_ROUTED = "hidden_states gating_output w1 w2 topk_weights topk_ids"

KINDS: Mapping[str, tuple[Kind, ...]] = {
    "gemm": (Kind(served.gemm, _AB, _product_work, _product_limits, capturable=True),),
    "grouped_gemm": (
        Kind(served.batched_gemm, _AB, _product_work, _product_limits, capturable=True),
        Kind(served.grouped_gemm, _AB | _OFFS, _product_work, _product_limits, _stored, fixed=_OFFS),
    ),
    "moe": (
        Kind(
            served.moe_fp8,
            frozenset(("routing_logits", *_FP8.split())),
            _fp8_work,
            # SwiGLU's result is rounded to e4m3: 2^-4 of an element at most, 2.6 % of all in norm.
            lambda task: (2.0**-4, 2.0**-3),
            _routing,
            optional=_SCALARS,
            fixed=_SCALARS | {"routing_logits"},
            arranged=_gate_first("gemm1_weights", "gemm1_weights_scale"),
        ),
        Kind(
            served.moe_routed,
            frozenset(_ROUTED.split()),
            _routed_work,
            lambda task: (4 * 2.0**-8, 12 * 2.0**-8),  # as of the lab's MoE layer
            fixed=frozenset(("topk_ids",)),
            arranged=_gate_first("w1"),
        ),
    ),
}
