"""scaled_grouped_mm: tensors -> ScaledProblem (checked once) -> choose -> backend.run; or, where b is in 4 bits,
`weight_only_mm.fp8`. And expertile::scaled_grouped_mm as a torch operator: what torch.compile, FakeTensor and opcheck
see."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from expertile.device import Device
from expertile.formats.weight_only import AnyQuantizedWeight, WeightBesideFp8
from expertile.ops import backend
from expertile.ops.backend import AUTO, Choice, Request, by_backend, first_able, planner
from expertile.ops.backend import device_of as _device
from expertile.ops.checks import require_tensors
from expertile.ops.grouped_mm.problem import Layout, described
from expertile.ops.scaled_grouped_mm.backends import BACKENDS, by_name, cuda_fp8
from expertile.ops.scaled_grouped_mm.problem import Backend, Operands, ScaledProblem
from expertile.ops.torch_op import define, meta_alone, no_options, traced, without_gradient
from expertile.ops.weight_only_mm.fp8 import fp8_weight_only_mm


def scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor | WeightBesideFp8,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor | None = None,
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
    multiplied together. No group needs padding. A backward pass raises: the gradients are calls of their own,

        dgrad  da = scaled_grouped_mm(dout8, w8t, …): ragged rows again, with the weights transposed in memory, since
               FP8 tensor cores read both operands with the summed dimension contiguous. `Fp8Blocks.transposed()` makes
               that copy of 128×128 blocks without quantising anew: pass its `values.transpose(-2, -1)`.
        wgrad  dw[g] = scaled_grouped_mm(xᵀ, dout, …, offs=aligned): ragged K, the sum over each group's tokens. Both
               operands are quantised along tokens: `Fp8Blocks.quantize_tokens`.

    Args:
        a: [M, K] float8_e4m3fn, the rows of each group together.
        b: [G, K, N] float8_e4m3fn; weights stored [G, N, K] are passed as `w.transpose(-2, -1)`. For ragged K: [K, N],
            stored [N, K] and passed transposed, beside a [M, K].
            Or a weight in 4 bits [G, N, K], as it is, which has its scales in itself: an `Mxfp4Fp8Weight`, or an
            `Int4Weight` in groups of 128 without zero points. Backends and configs are those of `weight_only_mm` then.
        scale_a: float32, [M, ceil(K/128)]: one for each 1×128; or [M], one for each row ([G·M] for ragged K).
        scale_b: float32, [G, ceil(N/128), ceil(K/128)]: one for each 128×128; or [G, N, ceil(K/128)]: for each 1×128;
            or, with one per row of a, [G, N]. For ragged K: [N, ceil(K/128)], or [G·N]. Any strides. None
            where b is in 4 bits.
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
    if isinstance(b, AnyQuantizedWeight):
        if scale_b is not None:
            raise ValueError(f"scale_b: expected None with an {type(b).__name__}, which has its own, got a value")
        require_tensors({"offs": offs, "bias": bias}, a=a, scale_a=scale_a)
        return fp8_weight_only_mm(
            a, b, scale_a, offs=offs, bias=bias, out_dtype=out_dtype, backend=backend, config=config, check=check
        )
    require_tensors({"offs": offs, "bias": bias}, a=a, b=b, scale_a=scale_a, scale_b=scale_b)
    assert scale_b is not None
    if traced(a, b, bias):
        no_options(config=config, check=check)
        if meta_alone(a):  # no value to look at, but the shapes
            ScaledProblem.of(a, b, scale_a, scale_b, offs, bias, out_dtype)
        return operator(a, b, scale_a, scale_b, offs, bias, out_dtype, backend)
    request = AUTO if backend == "auto" and config is None else Request(backend, config)
    return _eager(a, b, scale_a, scale_b, offs, bias, out_dtype, request, check)


def choose(problem: ScaledProblem, device: Device, backends: Sequence[Backend] = BACKENDS) -> Choice[Backend]:
    """The backend, its config and a sentence why. On a GPU the first backend that takes the problem without waiting for
    the device, with the config that its own model puts first; `cuda_fp8` says itself where it is slower. On a CPU,
    or where nothing else runs, the loop. ValueError with every backend's reason when none supports the problem."""
    if (like := _rounded_up(problem)) is not problem:
        with suppress(ValueError):
            choice = _choose(like, device, backends)
            if choice.backend.supports(problem, device) is None:
                return choice
    return _choose(problem, device, backends)


def _rounded_up(problem: ScaledProblem) -> ScaledProblem:
    """`problem` with its rows rounded up to one of 64 steps per doubling: models of a new number of rows take the host
    0.2 to 0.9 ms."""
    m = problem.m
    if problem.layout is not Layout.RAGGED_M or problem.group_sizes is not None or m < 128:
        return problem
    step = max(1 << (m.bit_length() - 7), 4)
    m, strides = -(-m // step) * step, problem.scale_a_strides
    beside = len(strides) == 2 and strides[0] == 1  # a block's scales, as the quantisers leave them
    return replace(problem, m=m, scale_a_strides=(1, max(m, strides[1])) if beside else strides)


@lru_cache(maxsize=4096)
def _choose(problem: ScaledProblem, device: Device, backends: Sequence[Backend]) -> Choice[Backend]:
    def unwanted(backend: Backend) -> str | None:
        beaten = backend is cuda_fp8.BACKEND and any(b.name == "gluon_fp8" for b in backends)
        return cuda_fp8.slower(problem) if beaten else None

    return first_able(problem, device, backends, "the first that takes it", unwanted)


def select(problem: ScaledProblem, device: Device, request: Request = AUTO) -> tuple[Backend, Any]:
    """The backend and config for a problem. ValueError when the named backend cannot take it, with its reason."""
    return backend.select(problem, device, request, by_name, choose, _rounded_up)


_planned = planner(ScaledProblem.of_descriptions, select)


def forward(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    request: Request = AUTO,
    check: bool = False,
) -> torch.Tensor:
    if request.config is None and not check and (offs is None or offs.is_cuda):
        fields = (*map(described, (a, b, scale_a, scale_b, offs, bias)), out_dtype)
        problem, chosen, config = _planned(fields, a.device, request)
    else:  # values are to be looked at, or the caller names a config
        problem = ScaledProblem.of(a, b, scale_a, scale_b, offs, bias, out_dtype, check)
        chosen, config = select(problem, _device(a.device.type, a.device.index), request)
    assert offs is not None
    offs = offs if offs.is_contiguous() else offs.contiguous()
    return chosen.run(problem, Operands(a, b, scale_a, scale_b, offs, bias), config, None)


def _fake(a: torch.Tensor, b: torch.Tensor, scale_a: Any, scale_b: Any, offs: Any, *rest: Any) -> torch.Tensor:
    _bias, out_dtype, _backend = rest
    m, n = a.shape[0], b.shape[-1]
    if b.dim() == 3:
        return a.new_empty((m, n), dtype=out_dtype)
    if offs is None:
        raise ValueError("offs: expected an int32 tensor for a 2-D by 2-D product, got None")
    return a.new_empty((offs.shape[0], m, n), dtype=out_dtype)


_eager = without_gradient("scaled_grouped_mm", forward)
# What calls the operator, its arguments in the order of its schema.
operator = define(
    "scaled_grouped_mm",
    by_backend(forward),
    "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? offs, Tensor? bias, ScalarType out_dtype, "
    "str backend) -> Tensor",
    fake=_fake,
)
