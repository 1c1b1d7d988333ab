"""What report 002 suspected of its FP8 kernel, each suspicion as a rival on the report's own shapes.

Inputs are those of `scaled_grouped_mm`; each rival is held against the product of what it is given:

- "expertile", "expertile-row": partial sums promoted with their scales every 128 of K, as blocks need it, and once at
  the end: what the report calls resetting the accumulator costs their difference.
- "expertile-vector": 1×128 scales of the weights too: 128 times as many scales to fetch.
- "expertile-triton_fp8": scales loaded when they are needed, where "expertile" on Hopper loads them a step ahead.
- "expertile-padded": rows copied into zeroed [E, 128, K] on every call, as the report's host code does.
- "multiplied": the report's first idea, two blocks added up and scaled by the product of their scales. It is wrong, s₁
  p₁ + s₂ p₂ ≠ s₁ s₂ (p₁ + p₂), which the gate says with the size of the error.
"""

import torch
from torch import Tensor

from expertile.lab.operators import products
from expertile.lab.operators import scaled_grouped_mm as blocks
from expertile.lab.race.operator import Call, Inputs, Operator, Rival, Workload
from expertile.ops.scaled_grouped_mm.api import scaled_grouped_mm
from expertile.ops.scaled_grouped_mm.backends import BACKENDS
from expertile.ragged import offs_from_sizes

_TILE = 128


def _vector(w: Workload, inputs: Inputs) -> Call:
    """The same scales, written out for every row of the weights."""
    *others, scale_b, offs = inputs
    spread = scale_b.repeat_interleave(_TILE, 1)[:, : w["n"]].contiguous()
    return blocks.ours(w, (*others, spread, offs))


def _padded(w: Workload, inputs: Inputs) -> Call:
    """Each group of equal size in room for whole tiles of 128 rows, all in separate calls of torch."""
    a, scale_a, weights, scale_b, _ = inputs
    groups, each = w["groups"], products.sizes(w)[0]
    room = -(-each // _TILE) * _TILE
    offs = offs_from_sizes([room] * groups).to(a.device)
    b = weights.transpose(-2, -1)

    def call() -> tuple[Tensor, ...]:
        # torch fills and copies no FP8, but bytes.
        rows = torch.zeros(groups, room, w["k"], dtype=torch.uint8, device=a.device)
        rows[:, :each] = a.view(torch.uint8).view(groups, each, -1)
        scales = torch.zeros(groups, room, scale_a.shape[1], device=a.device)
        scales[:, :each] = scale_a.view(groups, each, -1)
        padded = rows.view(groups * room, -1).view(a.dtype)
        out = scaled_grouped_mm(padded, b, scales.view(groups * room, -1), scale_b, offs=offs)
        return (out.view(groups, room, -1)[:, :each].reshape(groups * each, -1),)

    return call


def _multiplied(w: Workload, inputs: Inputs) -> Call:
    """In torch, two blocks of K at a time."""
    a, scale_a, weights, scale_b, _ = inputs
    n, k = w["n"], w["k"]

    def call() -> tuple[Tensor, ...]:
        out = torch.zeros(a.shape[0], n, device=a.device)
        for g, start, end in products.spans(w):
            by_column = scale_b[g].repeat_interleave(_TILE, 0)[:n]
            for first in range(0, k, 2 * _TILE):
                both, pair = slice(first, first + 2 * _TILE), slice(first // _TILE, first // _TILE + 2)
                part = a[start:end, both].float() @ weights[g, :, both].float().t()
                out[start:end] += part * scale_a[start:end, pair].prod(1)[:, None] * by_column[:, pair].prod(1)
        return (out.bfloat16(),)

    return call


def _shapes() -> tuple[Workload, ...]:
    """The report's two projections of DeepSeek-V3, 8 experts; and one that a CPU computes in a moment."""
    found = {
        f"{stage}-m{rows}": products.dims(8, 8 * rows, 1, n, k)
        for stage, n, k in (("gemm1", 4096, 7168), ("gemm2", 7168, 2048))
        for rows in (64, 128, 512)
    }
    found["small"] = products.dims(2, 20, 1, 128, 256)
    return tuple(Workload(name, "fp8-causes", "fp8_causes", dims, "fp8") for name, dims in found.items())


OPERATORS = (
    Operator(
        "fp8_causes",
        blocks.make_inputs,
        blocks.reference,
        blocks.work,
        (
            Rival("expertile", blocks.ours, peer=False),
            Rival("expertile-row", blocks.rowwise_call, peer=False, reference=blocks.rowwise_reference),
            Rival("expertile-vector", _vector, peer=False),
            *(r for r in products.own(blocks.ours, BACKENDS, blocks.problem) if r.name == "expertile-triton_fp8"),
            Rival("expertile-padded", _padded, peer=False),
            Rival("multiplied", _multiplied, graph=False),
        ),
        products.tolerance,
    ),
)
PRESETS = {"fp8-causes": _shapes}
