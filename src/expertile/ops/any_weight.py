"""grouped_mm and explain: the public calls, for weights of every kind."""

from typing import Any

import torch

from expertile.formats.weight_only import AnyQuantizedWeight, WeightBeside16Bits
from expertile.ops.backend import device_of
from expertile.ops.checks import require_tensors
from expertile.ops.grouped_mm import api as dense
from expertile.ops.grouped_mm.explain import Explanation, explain_problem
from expertile.ops.grouped_mm.problem import Problem
from expertile.ops.measure import MEASURE
from expertile.ops.weight_only_mm.api import choose, weight_only_mm
from expertile.ops.weight_only_mm.problem import WeightOnlyProblem


def grouped_mm(
    a: torch.Tensor = None,  # type: ignore[assignment]
    b: torch.Tensor | WeightBeside16Bits = None,  # type: ignore[assignment]
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    config: Any = None,
    check: bool = False,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    mat_a: torch.Tensor | None = None,
    mat_b: torch.Tensor | WeightBeside16Bits | None = None,
) -> torch.Tensor:
    """Many matrix products in one call: out[rows of group g] = a[rows of group g] @ b[g].

    The contract is that of `torch.nn.functional.grouped_mm`, and wider: bias, another output dtype, any strides,
    float16, float32 and float64; meta tensors, DTensors and torch.func.grad, vjp and vmap are taken as there.

    Args:
        a: [M, K] with the rows of each group together, or [G, M, K].
        b: [G, K, N], or [K, N]; weights stored [G, N, K] are passed as `w.transpose(-2, -1)`. Same dtype as `a`:
            bfloat16, float16 or float32 (TF32 only where `torch.backends.cuda.matmul.allow_tf32` allows it); or
            float64, in torch's own products, for gradcheck. Or an `Int4Weight` or `Mxfp4Weight` [G, N, K], as it is:
            see `weight_only_mm`, whose backends and errors are meant then.
        offs: [G] int32 on a's device: the END of each group along the ragged dimension. That is the rows of `a`
            (2-D × 3-D), the columns of `b` (3-D × 2-D) or the summed dimension (2-D × 2-D). None for 3-D × 3-D.
            Empty groups are allowed. Rows past offs[-1] of the result are left as they come: unspecified, and
            their gradient is zero.
        bias: [G, N], added to every row of its group; for 2-D × 3-D and 3-D × 3-D.
        out_dtype: dtype of the result; that of `a` by default. Products accumulate in float32 (float64: in
            float64).
        backend: "auto", or a backend's name (`expertile doctor` lists them), or "measure": the first call with a new
            problem races the candidates on these operands, which takes seconds and waits for the GPU; later calls take
            the winner. On a CPU, while a CUDA graph is captured, and for quantised weights it is "auto".
        config: a config of that backend (one of its `configs`); its default otherwise.
        check: also check the values of `offs`, which waits for the GPU. On a CPU they always are.
        batch_invariant: a row's bits depend on that row and its group's weight alone, not on how many rows there are,
            nor on what stands in them. For products whose rows are tokens (`b` 3-D), of tensors; with "auto" or a
            backend that has such configs. On one kind of GPU, with one version of expertile and Triton; on a CPU with
            one number of threads, where rows are multiplied one by one. It holds of the gradient of `a` too. The
            gradients of `b` and `bias` are sums over rows.
        out: a tensor for the result, of its shape, in the dtype that the result is to have; any strides by which each
            element has its own place; not a or b themselves. Not differentiable then, and not for torch.compile. Rows
            past offs[-1] are left alone.
        accumulate: add the result to `out` instead: weight gradients (2-D × 2-D) into the float32 buffer that
            Megatron and Transformer Engine keep. `gluon_hopper` adds as it stores; others make the product first.
        mat_a, mat_b: torch's names for `a` and `b`; given in their place.

    Returns:
        [M, N] (2-D × 3-D, 3-D × 2-D) or [G, M, N] (2-D × 2-D with zeros for empty groups, 3-D × 3-D).
        Differentiable in a, b and bias any number of times; under torch.compile once.

    Raises:
        ValueError: naming the argument, what was expected and what came; or a backend's reason to refuse.
    """
    if mat_a is not None or mat_b is not None:
        a, b = _one_of("a", a, "mat_a", mat_a), _one_of("b", b, "mat_b", mat_b)
    shared: Any = dict(offs=offs, bias=bias, out_dtype=out_dtype, config=config, check=check)
    if isinstance(b, AnyQuantizedWeight):
        if out is not None or accumulate:
            raise ValueError(f"out, accumulate: expected None and False with an {type(b).__name__}, got other values")
        if batch_invariant:
            raise ValueError(
                f"batch_invariant: expected False with an {type(b).__name__}, whose products depend on numbers of rows"
            )
        return weight_only_mm(a, b, backend="auto" if backend == MEASURE else backend, **shared)
    return dense.grouped_mm(
        a, b, backend=backend, batch_invariant=batch_invariant, out=out, accumulate=accumulate, **shared
    )


def explain(
    a: torch.Tensor,
    b: torch.Tensor | WeightBeside16Bits,
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Explanation:
    """Which backend `grouped_mm` would use for these operands, why, what bounds it, and what the others would take.

    Reads `offs` on the host (this waits for the GPU) to say how full the tiles are. Same errors as `grouped_mm` with
    `check=True`. Backends of quantised weights are taken by rule, so that no times of the others are told.
    """
    if isinstance(b, AnyQuantizedWeight):
        require_tensors({"offs": offs, "bias": bias}, a=a)
        packed = WeightOnlyProblem.of(a, b, offs, bias, out_dtype, check=True)
        return explain_problem(packed, device_of(a.device.type, a.device.index), choose)
    require_tensors({"offs": offs, "bias": bias}, a=a, b=b)
    problem = Problem.from_tensors(a, b, offs, bias, out_dtype, check=True)
    return explain_problem(problem, device_of(a.device.type, a.device.index))


def _one_of(name: str, x: Any, alias: str, y: Any) -> Any:
    if x is not None and y is not None:
        raise ValueError(f"{name}, {alias}: expected one of the two, got both")
    return y if x is None else x
