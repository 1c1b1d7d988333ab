"""Operators as the lab measures them: one file for each family.

`operators()` joins the families by operator name, `presets()` their workloads by preset name. `grouped_mm` is not among
them: its rivals are the backends that a run names. `memory_workloads` lists what peak memory is measured on, and
`for_cpu` keeps what a CPU measures in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from expertile.lab.operators import (
    add_scalar,
    attention,
    fp8_causes,
    grouped_mm,
    int4_grouped_mm,
    laplacian,
    layer_norm,
    moe,
    moe_routing,
    moe_stages,
    quantize,
    rms_norm,
    scaled_grouped_mm,
    softmax,
)
from expertile.lab.race.operator import Operator, Rival, Workload

__all__ = ["PRESETS", "Operator", "Rival", "Workload", "for_cpu", "memory_workloads", "operators", "presets"]

W = TypeVar("W", bound=Workload)
Build = Callable[[], tuple[Workload, ...]]

PRESETS: Mapping[str, str] = MappingProxyType(
    {
        "softmax-v100": "report 004's softmax, 1024² to 8192², fp32, forward and backward",
        "layernorm-v100": "report 004's layer norm, 16384 rows of its widths, fp32, forward and backward",
        "rows": "softmax, layer norm and RMS norm over rows of 128 to 131072, forward and backward",
        "attention-v100": "report 004's attention: B=4, H=8, D=64, length 256 to 2048, fp16, forward and backward",
        "attention": "attention up to length 16384, D=64 and 128, causal or not, bf16, forward and backward",
        "laplacian": "report 000's five-point stencil and grids beyond any cache, forward and backward",
        "add-scalar": "report 000's x + s, 32 thousand to 100 million elements",
        "quantize": "FP8 quantisers of activations (alone, after SwiGLU or a norm, with a transposed copy) and weights",
        "fp8-sweep": "report 002: 81 FP8 shapes of 1, 4 and 8 experts",
        "fp8-large": "FP8 products of training and prefill sizes, decode, uneven rows, and 8192³",
        "fp8-causes": "report 002's suspicions as variants: promotion, scale loads, padding, multiplied scales",
        "int4-models": "report 003's models and real ones in FP8 and INT4, decode to prefill, and group sizes",
        "moe": "the whole MoE layer, routing included, at three sizes, forward and training",
        "moe-stages": "the steps of that layer one by one, forward and backward",
        "moe-routing": "what stands between its products: choice of experts, permutation, token rounding",
        "moe-sonic": "the MoE layer at the sizes of SonicMoE's table, forward and training",
        "moe-decode": "the MoE layer at 1 to 128 tokens, sizes of Qwen3-30B-A3B, DeepSeek-V3 and gpt-oss-120b",
    }
)
"""What the presets hold, for displays."""

CPU_NBYTES = 64e6  # a CPU moves that in some 10 ms
CPU_FLOPS = 5e9  # and computes that in some 100 ms

_FAMILIES = (
    softmax,
    layer_norm,
    rms_norm,
    attention,
    laplacian,
    add_scalar,
    quantize,
    scaled_grouped_mm,
    fp8_causes,
    int4_grouped_mm,
    moe,
    moe_routing,
    moe_stages,
)
_MEMORY: Mapping[str, Build] = MappingProxyType({"attention": attention.memory_workloads})


def operators() -> Mapping[str, Operator]:
    """Every operator by its name, as `Workload.op` calls it."""
    return {operator.name: operator for family in _FAMILIES for operator in family.OPERATORS}


def presets() -> Mapping[str, Build]:
    """The presets of all families; one that several families hold parts of lists the parts one after another."""
    parts: dict[str, list[Build]] = {}
    for family in _FAMILIES:
        for name, build in family.PRESETS.items():
            parts.setdefault(name, []).append(build)
    return {name: _joined(tuple(builders)) for name, builders in parts.items()}


def memory_workloads(preset: str, workloads: Sequence[Workload]) -> tuple[Workload, ...]:
    """What peak memory is measured on for `preset`: lengths that double where it has such a list, else `workloads`."""
    return _MEMORY[preset]() if preset in _MEMORY else tuple(workloads)


def for_cpu(workloads: Sequence[W]) -> tuple[W, ...]:
    """`workloads` without the calls of operators that take a CPU seconds: at most `CPU_NBYTES` to move and `CPU_FLOPS`
    to compute."""
    return tuple(w for w in workloads if w.op == grouped_mm.OP or _light(w))


def _light(workload: Workload) -> bool:
    operator = operators()[workload.op]
    work = operator.work(workload)
    nbytes = work.nbytes if operator.set_nbytes is None else operator.set_nbytes(workload)
    return nbytes <= CPU_NBYTES and work.flops <= CPU_FLOPS


def _joined(builders: tuple[Build, ...]) -> Build:
    return lambda: tuple(workload for build in builders for workload in build())
