"""The gathered products: the public calls. Tensors -> GatherProblem (checked once) -> choose -> backend."""

from typing import Any

import torch

from expertile.ops.backend import Request
from expertile.ops.checks import require_tensors
from expertile.ops.gathered_mm import op
from expertile.ops.gathered_mm.backend import Operands
from expertile.ops.gathered_mm.problem import Product
from expertile.ops.gathered_mm.run import compute, gated_backward, wgrad
from expertile.ops.torch_op import no_options, traced


def gathered_mm(
    x: torch.Tensor,
    b: torch.Tensor,
    rows: torch.Tensor | None,
    offs: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    backend: str = "auto",
    config: Any = None,
) -> torch.Tensor:
    """Grouped product of gathered rows: out[r] = x[rows[r]] @ b[g] (+ bias[g]) for row r of expert g.

    Args:
        x: [T, K] bfloat16, float16 or float32; [R, K] in expert order where `rows` is None.
        b: [E, K, N] of x's dtype; weights stored [E, N, K] are passed as `w.transpose(-2, -1)`.
        rows: [R] int32, the token of each row; every entry a valid index, those past offs[-1] too. None: x's own rows.
        offs: [E] int32, the END row of each expert; experts without rows are allowed. Rows past offs[-1] of the result
            are left as they come: unspecified, and their gradient is zero.
        bias: [E, N], added to every row of its expert.
        backend: "auto", or a backend's name.
        config: a config of that backend; its default otherwise.

    Returns:
        [R, N] in x's dtype, accumulated in float32. Differentiable in x, b and bias; the gradient of x sums a token's
        rows in a fixed order.

    Raises:
        ValueError: naming the argument, what was expected and what came; or a backend's reason to refuse.
    """
    require_tensors({"rows": rows, "bias": bias}, x=x, b=b, offs=offs)
    if traced(x, b, bias):
        no_options(config=config)
        return op.call_mm(x, b, rows, offs, bias, backend)
    if torch.is_grad_enabled() and (x.requires_grad or b.requires_grad or (bias is not None and bias.requires_grad)):
        return op.differentiable_mm(x, b, rows, offs, bias, Request(backend, config))
    (out,) = compute(Product.MM, Operands(x, b, offs, rows, bias), Request(backend, config))
    return out


def gathered_gated_mm(
    x: torch.Tensor,
    b: torch.Tensor,
    rows: torch.Tensor | None,
    offs: torch.Tensor,
    *,
    activation: str = "swiglu",
    interleaved: bool,
    bias: torch.Tensor | None = None,
    save_pre: bool = True,
    backend: str = "auto",
    config: Any = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The up-projection of an expert with its gated activation: pre[r] = x[rows[r]] @ b[g] (+ bias[g]) and
    act[r] = f(gate, up) of pre[r]'s columns. Not differentiable: `gated_backward_mm` and `gathered_wgrad` are its
    backward pass.

    Args:
        x, rows, offs, bias, backend, config: as for `gathered_mm`, with N = 2I.
        b: [E, K, 2I]: gate and up columns as `interleaved` says.
        activation: "swiglu", "geglu" (tanh), "reglu" or "gpt_oss"; formulas in `gathered_mm.activation`.
        interleaved: columns are (g0, u0, g1, u1, …); otherwise the left half is gate and the right half up.
        save_pre: whether pre is wanted (for a backward pass); without it, fused backends never write it.
        batch_invariant: a row's bits depend on that row and its expert alone; as for `grouped_mm`. Not under
            torch.compile.

    Returns:
        (act [R, I], pre [R, 2I] or None) in x's dtype; rows past offs[-1] are unspecified. The activation is computed
        in float32, from the sums or from their rounding to x's dtype.

    Raises:
        ValueError: as `gathered_mm`.
    """
    require_tensors({"rows": rows, "bias": bias}, x=x, b=b, offs=offs)
    if traced(x, b, bias):
        no_options(config=config, batch_invariant=batch_invariant)
        act, pre = op.call_gated(x, b, rows, offs, bias, activation, interleaved, save_pre, backend)
        return act, pre if save_pre else None
    form: Any = {"activation": activation, "interleaved": bool(interleaved), "save_pre": bool(save_pre)}
    request = Request(backend, config, batch_invariant)
    act, pre = compute(Product.GATED, Operands(x, b, offs, rows, bias), request, **form)
    return act, pre


def gated_backward_mm(
    dy: torch.Tensor,
    down: torch.Tensor,
    rows: torch.Tensor | None,
    slots: torch.Tensor,
    weights: torch.Tensor,
    pre: torch.Tensor,
    offs: torch.Tensor,
    *,
    activation: str = "swiglu",
    interleaved: bool,
    overwrite_pre: bool = False,
    backend: str = "auto",
    config: Any = None,
    batch_invariant: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Backward pass of down-projection, gated activation and weighted sum, in one product with an epilogue.

    For row r of expert g, with w = weights[slots[r]], f the activation and a_r = dy[rows[r]] @ down[g]ᵀ:

        dpre[r]             = f'(pre[r]) · (w a_r)         gradient of the pre-activation
        act_w[r]            = w f(pre[r])                  so that ddown[g] = act_wᵀ @ dy[rows], `gathered_wgrad`
        dweights[slots[r]]  = <a_r, f(pre[r])>             gradient of the routing weight; 0 for dropped slots

    Args:
        dy: [T, H], the gradient of the layer's output; [R, H] in expert order where `rows` is None.
        down: [E, I, H] of dy's dtype: the down-projection as `gathered_mm(act, down)` takes it.
        rows, slots: [R] int32, token and slot t · k + j of each row; valid indices past offs[-1] too.
        weights: [T, k] float32.
        pre: [R, 2I] of dy's dtype, columns as `interleaved` says.
        overwrite_pre: pre is not needed again: dpre takes its memory, 2 R I elements less. Under torch.compile, and
            where pre is not contiguous or does not begin at a multiple of 16 bytes, dpre has its own memory anyway.
        offs, activation, interleaved, backend, config, batch_invariant: as for `gathered_gated_mm`.

    Returns:
        (dpre [R, 2I], act_w [R, I]) in dy's dtype and dweights [T, k] float32, every sum in a fixed order. Rows past
        offs[-1] are unspecified.

    Raises:
        ValueError: as `gathered_mm`.
    """
    require_tensors({"rows": rows}, dy=dy, down=down, slots=slots, weights=weights, pre=pre, offs=offs)
    if traced(dy, down, pre):
        no_options(config=config, batch_invariant=batch_invariant)
        return op.call_backward(dy, down, rows, slots, weights, pre, offs, activation, interleaved, backend)
    how: Any = {"activation": activation, "interleaved": bool(interleaved), "overwrite_pre": overwrite_pre}
    request = Request(backend, config, batch_invariant)
    dpre, act_w, dweights = gated_backward(dy, down, rows, slots, weights, pre, offs, request=request, **how)
    return dpre, act_w, dweights


def gathered_wgrad(
    x: torch.Tensor,
    rows: torch.Tensor | None,
    d: torch.Tensor,
    offs: torch.Tensor,
    *,
    gather_b: bool = False,
    backend: str = "auto",
    config: Any = None,
) -> torch.Tensor:
    """Gradient of expert weights: out[g] = Σ over rows r of expert g of x[rows[r]]ᵀ d[r].

    Args:
        x: [T, M], gathered by `rows`; [R, M] in expert order with `gather_b`, or where `rows` is None.
        rows: [R] int32, or None: nothing is gathered.
        d: [R, N] of x's dtype; [T, N], gathered by `rows`, with `gather_b`.
        offs: [E] int32. Rows past offs[-1] take no part.
        backend, config: as for `gathered_mm`.

    Returns:
        [E, M, N] in x's dtype, zeros for experts without rows.

    Raises:
        ValueError: as `gathered_mm`.
    """
    require_tensors({"rows": rows}, x=x, d=d, offs=offs)
    if traced(x, d):
        no_options(config=config)
        return op.call_wgrad(x, rows, d, offs, gather_b, backend)
    return wgrad(x, rows, d, offs, gather_b, Request(backend, config))
