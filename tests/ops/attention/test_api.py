"""The public call on a CPU: numbers against torch, gradients, edges, torch.compile and opcheck."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from expertile.ops.attention import attention, explain_attention


def _rand(*shape, dtype=torch.float64, grad=True):
    return torch.randn(*shape, dtype=dtype).requires_grad_(grad)


def _by_torch(q, k, v, causal=False, scale=None):
    """(out, LSE) with the mask aligned at the bottom right and rows without keys as zeros."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    s = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        lq, lk = s.shape[-2:]
        s = s.masked_fill(torch.ones(lq, lk, dtype=torch.bool).triu(lk - lq + 1), -math.inf)
    lse = torch.logsumexp(s, -1)
    weights = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return weights @ v, lse


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(1, 40),
    st.integers(1, 20),
    st.booleans(),
    st.sampled_from([None, 0.7, -0.4, 0.0]),
    st.integers(0, 2**31),
)
def test_any_shape(batch, kv_heads, group, lq, lk, dim, causal, scale, seed) -> None:
    torch.manual_seed(seed)
    q = _rand(batch, kv_heads * group, lq, dim)
    k, v = _rand(batch, kv_heads, lk, dim), _rand(batch, kv_heads, lk, dim)
    out, lse = attention(q, k, v, causal=causal, scale=scale, return_lse=True)
    want, want_lse = _by_torch(q, k, v, causal, scale)
    torch.testing.assert_close(out, want, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(lse, want_lse, atol=1e-12, rtol=1e-12)
    seen = torch.isfinite(want_lse)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = torch.autograd.grad((out, lse), (q, k, v), (dout, dlse))
    # logsumexp of nothing has no gradient in torch either, but NaN instead of none.
    if bool(seen.all()):
        for got, expected in zip(grads, torch.autograd.grad((want, want_lse), (q, k, v), (dout, dlse)), strict=True):
            torch.testing.assert_close(got, expected, atol=1e-11, rtol=1e-11)
    else:
        assert all(bool(torch.isfinite(g).all()) for g in grads)


@pytest.mark.parametrize("causal", [False, True])
def test_agrees_with_sdpa_where_lengths_agree(causal) -> None:
    q, k, v = (_rand(2, 3, 33, 16) for _ in range(3))
    torch.testing.assert_close(
        attention(q, k, v, causal=causal), scaled_dot_product_attention(q, k, v, is_causal=causal), atol=1e-7, rtol=1e-7
    )


def test_causal_is_aligned_at_the_bottom_right() -> None:
    q, k, v = _rand(1, 1, 2, 8), _rand(1, 1, 5, 8), _rand(1, 1, 5, 8)
    out = attention(q, k, v, causal=True)
    torch.testing.assert_close(out[:, :, 1:], attention(q[:, :, 1:], k, v), atol=1e-12, rtol=1e-9)
    torch.testing.assert_close(out[:, :, :1], attention(q[:, :, :1], k[:, :, :4], v[:, :, :4]), atol=1e-12, rtol=1e-9)


def test_rows_without_keys() -> None:
    q, k, v = _rand(1, 1, 5, 8), _rand(1, 1, 2, 8), _rand(1, 1, 2, 8)
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert bool((out[:, :, :3] == 0).all()) and bool((lse[:, :, :3] == -math.inf).all())
    assert bool(torch.isfinite(lse[:, :, 3:]).all())
    (dq,) = torch.autograd.grad(out.sum(), q)
    assert bool((dq[:, :, :3] == 0).all())
    out, lse = attention(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert bool((out == 0).all()) and bool((lse == -math.inf).all())


@pytest.mark.parametrize("causal", [False, True])
def test_packed_is_each_sequence_alone(causal) -> None:
    lens_q, lens_k = (4, 0, 1, 9), (6, 3, 0, 9)
    cu_q, cu_k = (torch.tensor((0, *lens)).cumsum(0).int() for lens in (lens_q, lens_k))
    q, k, v = _rand(14, 4, 8), _rand(18, 2, 8), _rand(18, 2, 8)
    out, lse = attention(
        q, k, v, causal=causal, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=9, max_seqlen_k=9, return_lse=True
    )
    assert lse.shape == (4, 14)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k, v), dout)
    for i in range(4):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        one = [x.detach().transpose(0, 1)[None].requires_grad_() for x in (q[rows], k[keys], v[keys])]
        alone, alone_lse = attention(*one, causal=causal, return_lse=True)
        torch.testing.assert_close(out[rows].transpose(0, 1)[None], alone, atol=1e-9, rtol=1e-9)
        torch.testing.assert_close(lse[None, :, rows], alone_lse, atol=1e-12, rtol=1e-12)
        for got, want in zip(
            (grads[0][rows], grads[1][keys], grads[2][keys]),
            torch.autograd.grad(alone, one, dout[rows].transpose(0, 1)[None]),
            strict=True,
        ):
            torch.testing.assert_close(got.transpose(0, 1)[None], want, atol=1e-12, rtol=1e-12)


def test_nan_and_infinity_go_where_arithmetic_takes_them() -> None:
    q, k, v = (_rand(1, 1, 4, 8, grad=False) for _ in range(3))
    q[0, 0, 1] = math.nan
    out = attention(q, k, v)
    assert bool(out[0, 0, 1].isnan().all()) and bool(out[0, 0, [0, 2, 3]].isfinite().all())
    q, k = torch.randn_like(q), torch.randn_like(k)
    k[0, 0, 3] = math.nan
    out = attention(q, k, v, causal=True)
    assert bool(out[0, 0, 3].isnan().all()) and bool(out[0, 0, :3].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_and_strides(dtype) -> None:
    q, k, v = (torch.randn(2, 30, 3, 24).to(dtype).transpose(1, 2).requires_grad_() for _ in range(3))
    out = attention(q, k, v, causal=True)
    assert out.dtype is dtype and out.stride() == q.stride()
    want, _ = _by_torch(*(x.detach().float() for x in (q, k, v)), causal=True)
    assert float((out.float() - want).norm() / want.norm()) < 6e-3
    out.float().square().sum().backward()
    assert q.grad is not None and q.grad.dtype is dtype


def test_gradcheck() -> None:
    q, k, v = _rand(1, 2, 4, 3), _rand(1, 1, 5, 3), _rand(1, 1, 5, 3)
    assert torch.autograd.gradcheck(lambda *x: attention(*x, causal=True), (q, k, v), atol=1e-5, rtol=1e-3)


def test_compiles_without_a_graph_break() -> None:
    def f(q, k, v):
        out, lse = attention(q, k, v, causal=True, return_lse=True)
        return out.square().sum() + lse.sum()

    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (9, 17):
        q, k, v = (_rand(2, 2, length, 8) for _ in range(3))
        got = torch.autograd.grad(compiled(q, k, v), (q, k, v))
        for g, w in zip(got, torch.autograd.grad(f(q, k, v), (q, k, v)), strict=True):
            torch.testing.assert_close(g, w, atol=1e-12, rtol=1e-12)


def test_opcheck() -> None:
    q, k, v = _rand(1, 4, 6, 8), _rand(1, 2, 7, 8), _rand(1, 2, 7, 8)
    forward = torch.ops.expertile.attention_forward.default
    torch.library.opcheck(forward, (q, k, v, None, None, None, None, True, 0.3, True, "auto"))
    cu = torch.tensor([0, 2, 6]).int()
    q, k, v = _rand(6, 2, 8), _rand(6, 2, 8), _rand(6, 2, 8)
    torch.library.opcheck(forward, (q, k, v, cu, cu, 4, 4, False, 0.3, False, "auto"))
    out, lse = forward(q, k, v, cu, cu, 4, 4, False, 0.3, False, "auto")
    arguments = (q, k, v, cu, cu, 4, 4, False, 0.3, False, "auto", out, lse, torch.randn_like(out), None)
    torch.library.opcheck(
        torch.ops.expertile.attention_backward.default,
        tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments),
    )


def test_autocast() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(q, k, v).dtype is torch.bfloat16


def test_errors() -> None:
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(TypeError, match="k: expected a torch.Tensor"):
        attention(q, None, q)
    with pytest.raises(ValueError, match="backend: expected auto or one of"):
        attention(q, q, q, backend="flash")
    with pytest.raises(ValueError, match="backend: gluon_hopper cannot take this problem"):
        attention(q, q, q, backend="gluon_hopper")


@pytest.mark.parametrize("call", [attention, explain_attention])
@pytest.mark.parametrize("scale", ["a", math.nan, math.inf, [1.0]])
def test_a_scale_is_a_number(call, scale):
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="scale: expected a finite number, got "):
        call(q, q, q, scale=scale)


def test_explain() -> None:
    q = torch.zeros(1, 2, 3, 8)
    text = str(explain_attention(q, q, q, causal=True))
    assert "None" not in text
    assert "forward:" in text and "backward:" in text and "unfused" in text and "reference" in text
