"""grouped_mm: the public call. Tensors -> Problem -> choose (both once for shapes seen before) -> backend.run."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch

from expertile.device import Device
from expertile.int4.weight import Int4Weight
from expertile.ops._select import NOT_INVARIANT, invariantly, selected
from expertile.ops._select import device_of as _device
from expertile.ops.grouped_mm import op
from expertile.ops.grouped_mm.autograd import GroupedMM
from expertile.ops.grouped_mm.backend import Backend, Operands
from expertile.ops.grouped_mm.backends import by_name
from expertile.ops.grouped_mm.choose import choose, choose_invariant, rounded
from expertile.ops.grouped_mm.explain import Explanation, explain_problem
from expertile.ops.grouped_mm.problem import Problem, described, in_standard_form, tf32_allowed
from expertile.ops.torch_op import traced


def grouped_mm(
    a: torch.Tensor = None,  # type: ignore[assignment]
    b: torch.Tensor | Int4Weight = None,  # type: ignore[assignment]
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    config: Any = None,
    check: bool = False,
    batch_invariant: bool = False,
    mat_a: torch.Tensor | None = None,
    mat_b: torch.Tensor | Int4Weight | None = None,
) -> torch.Tensor:
    """Many matrix products in one call: out[rows of group g] = a[rows of group g] @ b[g].

    The contract is that of `torch.nn.functional.grouped_mm`, and wider: bias, another output dtype, any strides,
    float16, float32 and float64; meta tensors, DTensors and torch.func.grad, vjp and vmap are taken as there.

    Args:
        a: [M, K] with the rows of each group together, or [G, M, K].
        b: [G, K, N], or [K, N]; weights stored [G, N, K] are passed as `w.transpose(-2, -1)`. Same dtype as `a`:
            bfloat16, float16 or float32 (TF32 only where `torch.backends.cuda.matmul.allow_tf32` allows it); or
            float64, in torch's own products, for gradcheck. Or an `Int4Weight` [G, N, K], as it is: see
            `int4_grouped_mm`, whose backends and errors are meant then.
        offs: [G] int32 on a's device: the END of each group along the ragged dimension. That is the rows of `a`
            (2-D × 3-D), the columns of `b` (3-D × 2-D) or the summed dimension (2-D × 2-D). None for 3-D × 3-D.
            Empty groups are allowed. Rows past offs[-1] of the result are left as they come: unspecified, and
            their gradient is zero.
        bias: [G, N], added to every row of its group; for 2-D × 3-D and 3-D × 3-D.
        out_dtype: dtype of the result; that of `a` by default. Products accumulate in float32 (float64: in
            float64).
        backend: "auto", or a backend's name (`expertile doctor` lists them).
        config: a config of that backend (one of its `configs`); its default otherwise.
        check: also check the values of `offs`, which waits for the GPU. On a CPU they always are.
        batch_invariant: a row's bits depend on that row and its group's weight alone, not on how many rows there are,
            nor on what stands in them. For products whose rows are tokens (`b` 3-D), of tensors; with "auto" or a
            backend that has such configs. On one kind of GPU, with one version of expertile and Triton; on a CPU with
            one number of threads, where rows are multiplied one by one. It holds of the gradient of `a` too. The
            gradients of `b` and `bias` are sums over rows.
        mat_a, mat_b: torch's names for `a` and `b`; given in their place.

    Returns:
        [M, N] (2-D × 3-D, 3-D × 2-D) or [G, M, N] (2-D × 2-D with zeros for empty groups, 3-D × 3-D).
        Differentiable in a, b and bias any number of times; under torch.compile once.

    Raises:
        ValueError: naming the argument, what was expected and what came; or a backend's reason to refuse.
    """
    if mat_a is not None or mat_b is not None:
        a, b = _one_of("a", a, "mat_a", mat_a), _one_of("b", b, "mat_b", mat_b)
    if batch_invariant:
        _require_tokens(a, b)
    if isinstance(b, Int4Weight):
        return _int4(a, b, offs=offs, bias=bias, out_dtype=out_dtype, backend=backend, config=config, check=check)
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or bias is not None:
        _require_tensors(a=a, b=b, bias=bias)
    kind = "cuda" if a.is_cuda else a.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        a, b, bias = _autocast(a, b, bias)
    if traced(a):
        if config is not None or check:
            raise ValueError("config, check: expected None and False under torch.compile, got other values")
        if a.is_meta:  # no value to look at, but the shapes
            Problem.from_descriptions(described(a), described(b), described(offs), described(bias), out_dtype)
        return operator(a, b, offs, bias, out_dtype, backend, batch_invariant)
    if check and kind == "cuda":  # on a CPU the values of offs are always checked
        Problem.from_tensors(a, b, offs, bias, out_dtype, check=True)
    product: Any = _forward
    if backend != "auto" or config is not None or batch_invariant:
        product = partial(_forward, backend=backend, config=config, batch_invariant=batch_invariant)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)):
        over_rows = partial(product, batch_invariant=False) if batch_invariant else product
        return GroupedMM.apply(product, over_rows, a, b, offs, bias, out_dtype)
    return product(a, b, offs=offs, bias=bias, out_dtype=out_dtype)


def _int4(a: torch.Tensor, w: Int4Weight, **arguments: Any) -> torch.Tensor:
    # Imported here: its backend "dequant" calls grouped_mm.
    from expertile.ops.int4_grouped_mm.api import int4_grouped_mm

    return int4_grouped_mm(a, w, **arguments)


def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Explanation:
    """Which backend `grouped_mm` would use for these operands, why, what bounds it, and what the others would take.

    Reads `offs` on the host (this waits for the GPU) to say how full the tiles are. Same errors as `grouped_mm`.
    """
    problem = Problem.from_tensors(a, b, offs, bias, out_dtype, check=True)
    return explain_problem(problem, _device(a.device.type, a.device.index))


def _one_of(name: str, x: Any, alias: str, y: Any) -> Any:
    if x is not None and y is not None:
        raise ValueError(f"{name}, {alias}: expected one of the two, got both")
    return y if x is None else x


def _require_tokens(a: Any, b: Any) -> None:
    if isinstance(b, Int4Weight):
        raise ValueError("batch_invariant: expected False with an Int4Weight, whose products depend on numbers of rows")
    if isinstance(b, torch.Tensor) and b.dim() == 2:
        raise ValueError("batch_invariant: expected False unless b is 3-D and rows of a are tokens, got a 2-D b")


def _require_tensors(**arguments: Any) -> None:
    for name, x in arguments.items():
        if not isinstance(x, torch.Tensor) and (x is not None or name != "bias"):
            raise ValueError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")


def _autocast(
    a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What torch.autocast does to a matrix product: floating operands in the autocast dtype."""
    dtype = torch.get_autocast_dtype(a.device.type)

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() and x.dtype is not torch.float64 else x

    return cast(a), cast(b), None if bias is None else cast(bias)


def select(
    problem: Problem, device: Device, backend: str, config: Any, batch_invariant: bool = False
) -> tuple[Backend, Any]:
    """The backend and config for a problem. ValueError when the named backend cannot take it, with its reason."""
    if batch_invariant:
        return _select_invariant(problem, device, backend, config)
    # Working configs out takes longer than a call: they are kept for rounded problems.
    return selected(
        backend, config, choose=lambda: choose(problem, device), by_name=by_name,
        refused=lambda b: b.supports(problem, device), default=lambda b: b.configs(rounded(problem), device)[0],
    )  # fmt: skip


def _select_invariant(problem: Problem, device: Device, backend: str, config: Any) -> tuple[Backend, Any]:
    """`select` among batch-invariant configs."""

    def refused(b: Backend) -> str | None:
        reason = b.supports(problem, device)
        if reason is None and not b.configs(rounded(problem), device):
            return NOT_INVARIANT
        return reason

    found = selected(
        backend, config, choose=lambda: choose_invariant(problem, device), by_name=lambda n: invariantly(by_name(n)),
        refused=refused, default=lambda b: b.configs(rounded(problem), device)[0],
    )  # fmt: skip
    if config is not None and config not in found[0].configs(problem, device):
        raise ValueError(f"config: expected one of {backend}'s batch-invariant configs, got {config!r}")
    return found


def _forward(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
    config: Any = None,
    batch_invariant: bool = False,
) -> torch.Tensor:
    if batch_invariant:
        a = in_standard_form(a)
    if config is None and (offs is None or getattr(offs, "is_cuda", False)):
        problem, chosen, config = _planned(
            described(a), described(b), described(offs), described(bias), out_dtype,
            a.dtype is torch.float32 and tf32_allowed(), a.device, backend, batch_invariant,
        )  # fmt: skip
    else:  # the values of offs are part of the problem, or somebody tries a config
        problem = Problem.from_tensors(a, b, offs, bias, out_dtype)
        chosen, config = select(problem, _device(a.device.type, a.device.index), backend, config, batch_invariant)
    if offs is not None and not offs.is_contiguous():
        offs = offs.contiguous()
    return chosen.run(problem, Operands(a, b, offs, bias), config, None)


@lru_cache(maxsize=4096)
def _planned(
    a: tuple[Any, ...] | None, b: tuple[Any, ...] | None, offs: tuple[Any, ...] | None, bias: tuple[Any, ...] | None,
    out_dtype: torch.dtype | None, allow_tf32: bool, device: torch.device, backend: str, batch_invariant: bool,
) -> tuple[Problem, Backend, Any]:  # fmt: skip
    """Problem, backend and config for tensors that are `described` so, whatever their values."""
    problem = Problem.from_descriptions(a, b, offs, bias, out_dtype, allow_tf32)
    return problem, *select(problem, _device(device.type, device.index), backend, None, batch_invariant)


# The torch operator, for code that must not see values: its arguments in the order of its schema.
operator = op.install(_forward)
