"""weight_only_mm: tensors -> WeightOnlyProblem (checked once) -> choose -> backend.run; expertile::weight_only_mm as a
torch operator: what torch.compile, FakeTensor and opcheck see; and its gradients.

The weights are not trainable. da[rows of g] = dout[rows of g] @ ŵ[g] is a grouped product with the weights dequantised
to a's dtype, a range of K after the other: as many of its columns as take `_RANGE_BYTES` for all experts.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch

from expertile.device import Device
from expertile.formats.quantized import QuantizedWeight
from expertile.formats.weight_only import NAMES, AnyQuantizedWeight, WeightBeside16Bits, weight_of
from expertile.ops import backend
from expertile.ops.backend import AUTO, Choice, Estimate, Request, by_backend, first_able, planner
from expertile.ops.backend import device_of as _device
from expertile.ops.checks import require_tensors
from expertile.ops.grouped_mm.api import plain_product
from expertile.ops.grouped_mm.autograd import bias_gradient, laid_out
from expertile.ops.grouped_mm.problem import described
from expertile.ops.grouped_mm.tail import zero_tail
from expertile.ops.torch_op import define, differentiable_eagerly, meta_alone, no_options, traced
from expertile.ops.weight_only_mm import dequantize
from expertile.ops.weight_only_mm.backends import BACKENDS, by_name
from expertile.ops.weight_only_mm.problem import WEIGHT, Backend, DescribedWeight, Operands, WeightOnlyProblem

_RANGE_BYTES = 2**28
# Mean rows per group from which `dequant` beats a backend. Dequantising moves 4.5 bytes a value whatever the rows
# (1.1 ps at 4.2 TB/s), and a row costs 2 FLOP a value. On an H200 (preset int4-models) gluon_int4 stays ahead of it up
# to the 2048 rows measured, triton_int4 up to 512.
DEQUANT_FROM_ROWS: Mapping[str, float] = MappingProxyType({"triton_int4": 768.0})


def weight_only_mm(
    a: torch.Tensor,
    w: WeightBeside16Bits,
    *,
    offs: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    config: Any = None,
    check: bool = False,
) -> torch.Tensor:
    """Products of 16-bit activations with 4-bit weights: out[rows of group g] = a[rows of group g] @ ŵ[g]ᵀ (+ bias[g]).

    ŵ = `w.dequantize()` is made in registers, tile by tile, and never stored. The backend "dequant" alone stores it;
    `auto` takes that for many hundreds of rows per group, where it is faster. No group needs padding. Differentiable in
    a and bias; the weights are not trainable, and the gradient of a dequantises a part of them at a time.

    Args:
        a: [M, K] bfloat16 or float16, the rows of each group together. Under torch.autocast it is cast to the dtype of
            w's scales, to autocast's where these are no floating-point numbers.
        w: `Int4Weight` [G, N, K], with scales of a's dtype, or `Mxfp4Weight` [G, N, K].
        offs: [G] int32 on a's device: the END row of each group. Empty groups are allowed; rows past offs[-1] of the
            result are left as they come, and their gradient is zero.
        bias: [G, N], added to every row of its group.
        out_dtype: bfloat16, float16 or float32; that of a by default. Products accumulate in float32 always.
        backend: "auto", or a backend's name.
        config: a config of that backend (one of its `configs`); its default otherwise.
        check: also check the values of `offs`, and scales and zero points (`w.check_numbers`), which waits for the GPU.

    Returns:
        [M, N].

    Raises:
        ValueError: naming the argument, what was expected and what came; or a backend's reason to refuse.
    """
    if not isinstance(w, AnyQuantizedWeight):
        raise ValueError(f"w: expected an {NAMES}, got {type(w).__name__}")
    require_tensors({"offs": offs, "bias": bias}, a=a)
    if w.scales.requires_grad or (w.zeros is not None and w.zeros.requires_grad):
        raise ValueError(f"{WEIGHT}: expected weights that need no gradient, got scales or zeros with requires_grad")
    if a.device.type != "meta" and torch.is_autocast_enabled(a.device.type):
        scales = w.scales.dtype
        a = a.to(scales if scales.is_floating_point else torch.get_autocast_dtype(a.device.type))
    if traced(a, w.packed, bias):
        no_options(config=config, check=check)
        if meta_alone(a):  # no value to look at, but the shapes
            WeightOnlyProblem.of(a, w, offs, bias, out_dtype)
        return operator(a, *w.parts, offs, bias, out_dtype, backend)
    if check:
        WeightOnlyProblem.of(a, w, offs, bias, out_dtype, check=True)
    request = AUTO if backend == "auto" and config is None else Request(backend, config)
    if torch.is_grad_enabled() and (a.requires_grad or (bias is not None and bias.requires_grad)):
        return differentiable_mm(a, w, offs, bias, out_dtype, request)
    return forward(a, w, offs, bias, out_dtype, request)


int4_grouped_mm = weight_only_mm  # as it was called when INT4 was the only format


@lru_cache(maxsize=4096)
def choose(problem: WeightOnlyProblem, device: Device, backends: Sequence[Backend] = BACKENDS) -> Choice[Backend]:
    """The backend, its config and a sentence why. On a GPU the first backend that takes the problem without waiting for
    the device, with the config that its own model puts first; unless groups have so many rows that dequantising first
    costs less than unpacking for every tile of rows. On a CPU the loop. ValueError with every backend's reason when
    none supports the problem."""
    # A CPU dequantises an expert at a time, into float32, rather than all of them.
    asked = backends if device.kind == "cuda" else (by_name("loop"),)
    choice = first_able(problem, device, asked, "the first that takes it")
    name, rows, dense = choice.backend.name, problem.mean_group, by_name("dequant")
    limit = DEQUANT_FROM_ROWS.get(name, math.inf)
    if rows < limit or dense.supports(problem, device) is not None:
        return choice
    slower = Estimate(name, None, f"groups of {rows:.0f} rows: from {limit:.0f} on dequant is faster")
    why = f"dequant: {rows:.0f} rows per group pay for dequantised weights"
    return Choice(dense, dense.configs(problem, device)[0], why, (*choice.estimates, slower))


def select(problem: WeightOnlyProblem, device: Device, request: Request = AUTO) -> tuple[Backend, Any]:
    """The backend and config for a problem. ValueError when the named backend cannot take it, with its reason."""
    return backend.select(problem, device, request, by_name, choose)


_planned = planner(WeightOnlyProblem.of_descriptions, select)


def forward(
    a: torch.Tensor,
    w: QuantizedWeight,
    offs: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    request: Request = AUTO,
    scale_a: torch.Tensor | None = None,
) -> torch.Tensor:
    if request.config is None and (offs is None or offs.is_cuda):
        fields = (described(a), DescribedWeight.of(w), described(offs), described(bias), out_dtype, described(scale_a))
        problem, chosen, config = _planned(fields, a.device, request)
    else:  # the values of offs are part of the problem, or somebody tries a config
        problem = WeightOnlyProblem.of(a, w, offs, bias, out_dtype, scale_a=scale_a)
        chosen, config = select(problem, _device(a.device.type, a.device.index), request)
    assert offs is not None
    offs = offs if offs.is_contiguous() else offs.contiguous()
    return chosen.run(problem, Operands(a, w, offs, bias, scale_a), config, None)


def _operator_kernel(a: torch.Tensor, *rest: Any) -> torch.Tensor:
    *parts, offs, bias, out_dtype, request = rest
    return forward(a, weight_of(*parts), offs, bias, out_dtype, request)


def _fake(a: torch.Tensor, packed: torch.Tensor, *rest: Any) -> torch.Tensor:
    *_, out_dtype, _backend = rest
    return a.new_empty((a.shape[0], packed.shape[1]), dtype=a.dtype if out_dtype is None else out_dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Of the operator, which takes a weight's `parts`, and of eager calls, which take the weight."""
    a, *weight, offs, bias, _, _ = inputs
    packed, scales, zeros, *ctx.kind = weight[0].parts if len(weight) == 1 else weight
    ctx.save_for_backward(packed, scales, zeros, offs, bias)
    ctx.dtype = a.dtype


def ranges(rows: int, k: int, itemsize: int) -> list[tuple[int, int]]:
    """The ranges of K, (first, last), in which `rows` rows of weights are dequantised."""
    width = max(1, _RANGE_BYTES // max(1, rows * itemsize * dequantize.RANGES)) * dequantize.RANGES
    return [(first, min(first + width, k)) for first in range(0, k, width)]


def activation_gradient(grad: torch.Tensor, w: QuantizedWeight, offs: torch.Tensor) -> torch.Tensor:
    """grad[rows of g] @ ŵ[g], [M, K] in grad's dtype, with zeros past offs[-1]. Not differentiable.

    The weights are dequantised a range of K after the other.
    """
    g, n, k = w.shape
    products = []
    for first, last in ranges(g * n, k, grad.dtype.itemsize):
        dense = dequantize.weight_only_dequantize(*w.parts, grad.dtype, first, last)
        products.append(plain_product(grad, dense, offs=offs, out_dtype=grad.dtype))
        del dense  # its memory is the next range's
    return zero_tail(products[0] if len(products) == 1 else torch.cat(products, 1), offs, dim=0)


def _gradient(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    packed, scales, zeros, offs, bias = ctx.saved_tensors
    needs_a, *between, needs_bias, _, _ = ctx.needs_input_grad
    grad = laid_out(grad, ctx.dtype)
    da = dbias = None
    if needs_a:
        da = activation_gradient(grad, weight_of(packed, scales, zeros, *ctx.kind), offs)
    if needs_bias:
        dbias = bias_gradient(plain_product, grad, offs, bias)
    return da, *(None for _ in between), dbias, None, None


# What calls the operator, its arguments in the order of its schema; and `forward` in eager calls.
operator = define(
    "weight_only_mm",
    by_backend(_operator_kernel),
    "(Tensor a, Tensor packed, Tensor scales, Tensor? zeros, str format, SymInt group_size, SymInt k, Tensor? offs, "
    "Tensor? bias, ScalarType? out_dtype, str backend) -> Tensor",
    fake=_fake,
    gradient=_gradient,
    setup=_setup,
)
differentiable_mm = differentiable_eagerly(forward, _setup, _gradient)
