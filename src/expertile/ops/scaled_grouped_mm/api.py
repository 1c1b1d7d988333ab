"""scaled_grouped_mm: the public call. Tensors -> ScaledProblem (checked once) -> choose -> backend.run."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from expertile.device import Device
from expertile.ops._select import device_of as _device
from expertile.ops._select import selected
from expertile.ops.grouped_mm.problem import described
from expertile.ops.scaled_grouped_mm import op
from expertile.ops.scaled_grouped_mm.backend import Backend, Operands
from expertile.ops.scaled_grouped_mm.backends import by_name
from expertile.ops.scaled_grouped_mm.choose import choose
from expertile.ops.scaled_grouped_mm.problem import ScaledProblem
from expertile.ops.torch_op import traced


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    config: Any = None,
    check: bool = False,
) -> torch.Tensor:
    """Many FP8 products in one call: out[rows of group g] = (a ∘ scale_a)[rows of group g] @ (b ∘ scale_b)[g].

    Partial sums over 128 elements of K are scaled and added up in float32; scales of neighbouring blocks are never
    multiplied together. No group needs padding. Not differentiable: the gradients are calls of their own,

        dgrad  da = scaled_grouped_mm(dout8, w8t, …): ragged rows again, with the weights transposed in memory, since
               FP8 tensor cores read both operands with the summed dimension contiguous. `Fp8Blocks.transposed()` makes
               that copy of 128×128 blocks without quantising anew: pass its `values.transpose(-2, -1)`.
        wgrad  dw[g] = scaled_grouped_mm(xᵀ, dout, …, offs=aligned): ragged K, the sum over each group's tokens. Both
               operands are quantised along tokens: `Fp8Blocks.quantize_tokens`.

    Args:
        a: [M, K] float8_e4m3fn, the rows of each group together.
        b: [G, K, N] float8_e4m3fn; weights stored [G, N, K] are passed as `w.transpose(-2, -1)`. For ragged K: [K, N],
            stored [N, K] and passed transposed, beside a [M, K].
        scale_a: float32, [M, ceil(K/128)]: one for each 1×128; or [M], one for each row ([G·M] for ragged K).
        scale_b: float32, [G, ceil(N/128), ceil(K/128)]: one for each 128×128; or [G, N, ceil(K/128)]: for each 1×128;
            or, with one per row of a, [G, N]. For ragged K: [N, ceil(K/128)], or [G·N]. Any strides.
        offs: [G] int32 on a's device: the END row of each group. Empty groups are allowed; rows past offs[-1] of the
            result are left as they come. For ragged K with 1×128 scales: multiples of 128.
        bias: [G, N], added to every row of its group.
        out_dtype: bfloat16, float16 or float32.
        backend: "auto", or a backend's name.
        config: a config of that backend (one of its `configs`); its default otherwise.
        check: also check the values of `offs` and that the scales are finite, which waits for the GPU.

    K need be no multiple of 128: its last block is a short one, with a scale of its own. The Hopper kernel wants
    multiples of 16 (TMA), others take any.

    Returns:
        [M, N], or [G, M, N] for ragged K, with zeros for empty groups.

    Raises:
        ValueError: naming the argument, what was expected and what came; or a backend's reason to refuse.
    """
    for name, x in (("a", a), ("b", b), ("scale_a", scale_a), ("scale_b", scale_b), ("offs", offs), ("bias", bias)):
        if not isinstance(x, torch.Tensor) and (x is not None or name not in ("offs", "bias")):
            raise ValueError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if traced(a):
        if config is not None or check:
            raise ValueError("config, check: expected None and False under torch.compile, got other values")
        return torch.ops.expertile.scaled_grouped_mm(a, b, scale_a, scale_b, offs, bias, out_dtype, backend)
    return _forward(
        a, b, scale_a, scale_b, offs=offs, bias=bias, out_dtype=out_dtype, backend=backend, config=config, check=check
    )


def select(problem: ScaledProblem, device: Device, backend: str, config: Any) -> tuple[Backend, Any]:
    """The backend and config for a problem. ValueError when the named backend cannot take it, with its reason."""
    return selected(
        backend, config, choose=lambda: choose(problem, device), by_name=by_name,
        refused=lambda b: b.supports(problem, device), default=lambda b: b.configs(problem, device)[0],
    )  # fmt: skip


def _forward(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
    config: Any = None,
    check: bool = False,
) -> torch.Tensor:
    if config is None and not check and (offs is None or offs.is_cuda):
        problem, chosen, config = _planned(
            described(a), described(b), described(scale_a), described(scale_b), described(offs), described(bias),
            out_dtype, a.device, backend,
        )  # fmt: skip
    else:  # values are to be looked at, or somebody tries a config
        problem = ScaledProblem.of(a, b, scale_a, scale_b, offs, bias, out_dtype, check)
        chosen, config = select(problem, _device(a.device.type, a.device.index), backend, config)
    assert offs is not None
    offs = offs if offs.is_contiguous() else offs.contiguous()
    return chosen.run(problem, Operands(a, b, scale_a, scale_b, offs, bias), config, None)


@lru_cache(maxsize=4096)
def _planned(
    a: tuple[Any, ...], b: tuple[Any, ...], scale_a: tuple[Any, ...], scale_b: tuple[Any, ...],
    offs: tuple[Any, ...] | None, bias: tuple[Any, ...] | None, out_dtype: torch.dtype, device: torch.device,
    backend: str,
) -> tuple[ScaledProblem, Backend, Any]:  # fmt: skip
    """Problem, backend and config for tensors that are `described` so, whatever their values."""
    problem = ScaledProblem.of_descriptions(a, b, scale_a, scale_b, offs, bias, out_dtype)
    return problem, *select(problem, _device(device.type, device.index), backend, None)


op.install(_forward)
