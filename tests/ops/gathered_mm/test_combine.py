"""combine on the CPU: values, gradients, what it is as an operator, and what it refuses."""

import pytest
import torch

from expertile.ops.gathered_mm.combine import combine


def routed(tokens: int, top_k: int, cols: int, dtype: torch.dtype, seed: int = 0, device: str = "cpu"):
    """(y, positions, weights) with some slots dropped, one token without any; NaN in what must not take part."""
    gen = torch.Generator(device=device).manual_seed(seed)
    count = tokens * top_k + 2
    y = torch.randn(count, cols, generator=gen, device=device).to(dtype)
    positions = torch.randperm(count - 2, generator=gen, device=device).view(tokens, top_k).to(torch.int32)
    positions[1, 0] = positions[0, top_k - 1] = -1
    positions[tokens - 2] = -1
    weights = torch.rand(tokens, top_k, generator=gen, device=device)
    weights[positions < 0] = float("nan")
    unused = torch.ones(count, dtype=torch.bool, device=device)
    unused[positions[positions >= 0].long()] = False
    y[unused] = float("nan")
    return y, positions, weights


def dense_combine(y: torch.Tensor, positions: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The sum as a product with a [T, R] matrix, in float64."""
    kept = positions >= 0
    matrix = torch.zeros(positions.shape[0], y.shape[0], dtype=torch.float64, device=y.device)
    token = torch.arange(positions.shape[0], device=y.device)[:, None].expand_as(positions)
    matrix = matrix.index_put((token[kept], positions[kept].long()), weights[kept].double())
    return matrix @ y.double().nan_to_num()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 2.0**-8), (torch.float16, 1e-3)])
@pytest.mark.parametrize("top_k", [1, 2, 8, 32])
def test_values(top_k, dtype, tolerance):
    y, positions, weights = routed(7, top_k, 24, dtype)
    torch.testing.assert_close(
        combine(y, positions, weights).double(), dense_combine(y, positions, weights), rtol=tolerance, atol=tolerance
    )


def test_without_weights():
    y, positions, _ = routed(7, 2, 24, torch.float32)
    want = dense_combine(y, positions, torch.ones(7, 2))
    torch.testing.assert_close(combine(y, positions).double(), want, rtol=1e-6, atol=1e-6)


def test_gradients():
    y, positions, weights = routed(6, 3, 20, torch.float32)
    y, weights = y.nan_to_num().requires_grad_(), weights.nan_to_num().requires_grad_()
    grad = torch.randn(6, 20)
    got = torch.autograd.grad(combine(y, positions, weights), (y, weights), grad)
    wide = y.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    want = torch.autograd.grad(dense_combine(wide[0], positions, wide[1]), wide, grad.double())
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=1e-5)
    (alone,) = torch.autograd.grad(combine(y, positions, weights.detach()), y, grad)
    assert torch.equal(alone, got[0])
    (alone,) = torch.autograd.grad(combine(y.detach(), positions, weights), weights, grad)
    assert torch.equal(alone, got[1])


@pytest.mark.parametrize("rows, tokens, cols, top_k", [(0, 0, 8, 2), (4, 0, 8, 2), (4, 2, 0, 2), (4, 2, 8, 0)])
def test_empty(rows, tokens, cols, top_k):
    y = torch.randn(rows, cols, requires_grad=True)
    out = combine(y, torch.full((tokens, top_k), -1, dtype=torch.int32), torch.rand(tokens, top_k))
    assert out.shape == (tokens, cols) and not out.any()
    out.sum().backward()
    assert not y.grad.any()


def test_no_rows_at_all_is_zeros():
    out = combine(torch.empty(0, 8), torch.full((3, 2), -1, dtype=torch.int32))
    assert torch.equal(out, torch.zeros(3, 8))


def test_operator():
    y, positions, weights = routed(6, 3, 20, torch.float32)
    y, weights = y.nan_to_num().requires_grad_(), weights.nan_to_num().requires_grad_()
    torch.library.opcheck(torch.ops.expertile.combine, (y, positions, weights))
    grad = torch.randn(6, 20)
    args = (grad, y.detach(), positions, weights.detach())
    torch.library.opcheck(torch.ops.expertile.combine_backward, (*args, True, False))


def test_compiles_for_any_number_of_tokens():
    compiled = torch.compile(lambda *xs: combine(*xs).relu(), fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (6, 9, 20):
        y, positions, weights = routed(tokens, 3, 20, torch.float32, seed=tokens)
        y, weights = y.nan_to_num().requires_grad_(), weights.nan_to_num().requires_grad_()
        got, want = compiled(y, positions, weights), combine(y, positions, weights).relu()
        assert torch.equal(got, want)
        for g, w in zip(*(torch.autograd.grad(o.sum(), (y, weights)) for o in (got, want)), strict=True):
            assert torch.equal(g, w)


Y, P, W = torch.randn(8, 4), torch.zeros(4, 2, dtype=torch.int32), torch.rand(4, 2)


@pytest.mark.parametrize(
    "args, message",
    [
        ((None, P, W), "y: expected a torch.Tensor, got NoneType"),
        ((Y, [1], W), "positions: expected a torch.Tensor, got list"),
        ((Y[0], P, W), r"y: expected 2 dimensions, got shape \[4\]"),
        ((Y.long(), P, W), "y: expected float32, bfloat16, float16 or float64, got torch.int64"),
        ((Y, P.long(), W), "positions: expected dtype torch.int32, got torch.int64"),
        ((Y, P, W.half()), "weights: expected dtype torch.float32, got torch.float16"),
        ((Y, P, W[:2]), r"weights: expected shape \[4, 2\] as positions has, got \[2, 2\]"),
        ((Y, P.to("meta"), W), "positions: expected device cpu as y has, got meta"),
    ],
)
def test_errors_name_the_argument(args, message):
    with pytest.raises(ValueError, match=message):
        combine(*args)
