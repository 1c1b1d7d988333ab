"""Problem: what is validated, and what is counted."""

import pytest
import torch

from expertile.ops.attention.api import attention
from expertile.ops.attention.problem import Problem


def _qkv(lq=5, lk=7, h=4, hk=2, d=8, b=2, dtype=torch.float32):
    return torch.zeros(b, h, lq, d, dtype=dtype), *(torch.zeros(b, hk, lk, d, dtype=dtype) for _ in range(2))


def _packed(h=4, hk=2, d=8):
    cu_q, cu_k = torch.tensor([0, 3, 5]).int(), torch.tensor([0, 1, 9]).int()
    return torch.zeros(5, h, d), torch.zeros(9, hk, d), torch.zeros(9, hk, d), cu_q, cu_k


def test_dense() -> None:
    p = Problem.from_tensors(*_qkv(), causal=True)
    assert (p.batch, p.heads, p.kv_heads, p.group, p.q_len, p.k_len, p.head_dim) == (2, 4, 2, 2, 5, 7, 8)
    assert p.q_strides == (4 * 5 * 8, 5 * 8, 8) and p.scale == 8**-0.5 and not p.packed and not p.empty
    hash(p)


def test_packed() -> None:
    q, k, v, cu_q, cu_k = _packed()
    p = Problem.from_tensors(q, k, v, cu_q, cu_k, 3, 100)
    assert (p.batch, p.q_len, p.k_len, p.q_rows, p.k_rows) == (2, 3, 9, 5, 9)
    assert p.q_strides == (0, 8, 32)


def test_pairs_of_a_causal_mask() -> None:
    for lq, lk in ((5, 7), (7, 5), (4, 4), (1, 6)):
        p = Problem.from_tensors(*_qkv(lq, lk, b=1), causal=True)
        seen = sum(min(lk, max(0, i + 1 + lk - lq)) for i in range(lq))
        assert p.pairs() == seen
        assert p.work().flops == 4 * 4 * seen * 8 and p.backward_work().flops == 2.5 * p.work().flops


def test_one_element_dimensions_go_by_their_neighbours() -> None:
    q = torch.zeros(3, 1, 5, 8).expand(3, 1, 5, 8).transpose(0, 1)  # [1, 3, 5, 8], odd stride of dimension 0
    p = Problem.from_tensors(q, q, q)
    assert p.q_strides == (3 * 5 * 8, 40, 8)


def test_alignment() -> None:
    q = torch.zeros(2, 4, 5, 16, dtype=torch.bfloat16)
    assert Problem.from_tensors(q, q, q).aligned
    shifted = torch.zeros(2 * 4 * 5 * 16 + 1, dtype=torch.bfloat16)[1:].view(2, 4, 5, 16)
    assert not Problem.from_tensors(shifted, q, q).aligned


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda q, k, v: (q[0], k, v), ValueError, "q: expected 4 dimensions"),
        (lambda q, k, v: (q, k.half(), v), ValueError, "k: expected dtype"),
        (lambda q, k, v: (q, k, v[:, :, 1:]), ValueError, "v: expected shape"),
        (lambda q, k, v: (q[:, :3], k, v), ValueError, "q: expected a multiple of k's 2 heads, got 3"),
        (lambda q, k, v: (q, k[:1], v[:1]), ValueError, "k: expected batch 2"),
        (lambda q, k, v: (q, k[..., :4], v), ValueError, "k: expected a last dimension of 8"),
        (lambda q, k, v: (q.long(), k, v), ValueError, "q: expected a dtype"),
        (lambda q, k, v: (q, k, None), TypeError, "v: expected a torch.Tensor, got NoneType"),
        (lambda q, k, v: (q[..., ::2], k[..., ::2], v[..., ::2]), ValueError, "contiguous last dimension"),
    ],
)
def test_dense_errors(change, error, words) -> None:
    with pytest.raises(error, match=words):
        Problem.from_tensors(*change(*_qkv()))


def test_head_dimension_over_256() -> None:
    with pytest.raises(ValueError, match="1 to 256, got 264"):
        Problem.from_tensors(*_qkv(d=264))


def test_packed_errors() -> None:
    q, k, v, cu_q, cu_k = _packed()
    with pytest.raises(TypeError, match="cu_seqlens_k: expected an int32 tensor"):
        Problem.from_tensors(q, k, v, cu_q, None, 3, 8)
    with pytest.raises(ValueError, match="cu_seqlens_q: expected int32"):
        Problem.from_tensors(q, k, v, cu_q.long(), cu_k, 3, 8)
    with pytest.raises(ValueError, match="cu_seqlens_k: expected length 3"):
        Problem.from_tensors(q, k, v, cu_q, cu_k[:2], 3, 8)
    with pytest.raises(ValueError, match="max_seqlen_q: expected the longest"):
        Problem.from_tensors(q, k, v, cu_q, cu_k, None, 8)
    with pytest.raises(ValueError, match="max_seqlen_k: expected None without cu_seqlens"):
        Problem.from_tensors(*_qkv(), max_seqlen_k=4)
    with pytest.raises(ValueError, match="scale: expected a finite number"):
        Problem.from_tensors(*_qkv(), scale=float("nan"))


@pytest.mark.parametrize(
    ("starts", "longest", "message"),
    [
        ([0, 3, 8], 5, "cu_seqlens_q: expected 0 to 9, q's rows"),
        ([1, 3, 9], 6, "cu_seqlens_q"),
        ([0, 8, 3, 9], 9, "never decreasing"),
        ([0, 3, 12], 9, "cu_seqlens_q"),
        ([0, 3, 9], 5, "max_seqlen_q: expected at least 6, the longest sequence, got 5"),
    ],
)
def test_packed_sequences_on_a_cpu_cover_the_rows(starts, longest, message):
    """Rows of no sequence would be left as they were, which nobody asks for."""
    q, cu = torch.randn(9, 2, 8), torch.tensor(starts, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        attention(q, q, q, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=longest, max_seqlen_k=longest)
