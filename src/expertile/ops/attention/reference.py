"""Attention by its definition, in float32 (float64 for float64 inputs), some query rows at a time: the definition of
right, and the way to compute it without a GPU. Takes every dtype, stride and length; memory is linear in length."""

from collections.abc import Iterator

import torch

from expertile.device import Device
from expertile.ops.attention.backend import Backend, Direction, Operands, Saved, new_lse
from expertile.ops.attention.problem import Problem
from expertile.ops.backend import NoConfig, one_config
from expertile.ops.launch.device import wide

_CHUNK_ELEMENTS = 1 << 24  # of scores at a time
_NO_CONFIG = NoConfig()


def _sequences(problem: Problem, cu_q: torch.Tensor | None, cu_k: torch.Tensor | None) -> Iterator[tuple[int, ...]]:
    """(sequence, first query row, queries, first key row, keys)"""
    if not problem.packed:
        for b in range(problem.batch):
            yield b, 0, problem.q_len, 0, problem.k_len
        return
    assert cu_q is not None and cu_k is not None
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    for b in range(problem.batch):
        yield b, ends_q[b], ends_q[b + 1] - ends_q[b], ends_k[b], ends_k[b + 1] - ends_k[b]


def _rows(x: torch.Tensor, problem: Problem, b: int, start: int, length: int) -> torch.Tensor:
    """[heads, length, D] of one sequence: a view."""
    return x[start : start + length].transpose(0, 1) if problem.packed else x[b]


def _lse_rows(lse: torch.Tensor, problem: Problem, b: int, start: int, length: int) -> torch.Tensor:
    return lse[:, start : start + length] if problem.packed else lse[b]


def _scores(problem: Problem, q: torch.Tensor, k: torch.Tensor, first: int, q_len: int) -> torch.Tensor:
    """scale · q kᵀ of query rows [first, first + rows) of a sequence, minus infinity where masked."""
    s = torch.matmul(q, k.transpose(-1, -2)) * problem.scale
    if problem.causal:
        rows, keys = s.shape[-2:]
        i = torch.arange(first, first + rows, device=s.device)[:, None]
        hidden = torch.arange(keys, device=s.device)[None, :] > i + keys - q_len
        s = s.masked_fill(hidden, float("-inf"))
    return s


def _chunk(problem: Problem, keys: int) -> int:
    return max(1, _CHUNK_ELEMENTS // max(1, problem.heads * keys))


def forward(problem: Problem, operands: Operands, config: NoConfig = _NO_CONFIG) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, LSE). Rows that see no key are zeros with an LSE of minus infinity."""
    out, lse = torch.empty_like(operands.q), new_lse(problem, operands.q)
    for b, q0, q_len, k0, k_len in _sequences(problem, operands.cu_seqlens_q, operands.cu_seqlens_k):
        q, o = (_rows(x, problem, b, q0, q_len) for x in (operands.q, out))
        k, v = (wide(_rows(x, problem, b, k0, k_len)) for x in (operands.k, operands.v))
        k, v = (x.repeat_interleave(problem.group, 0) for x in (k, v))
        rows_lse = _lse_rows(lse, problem, b, q0, q_len)
        step = _chunk(problem, k_len)
        for i in range(0, q_len, step):
            s = _scores(problem, wide(q[:, i : i + step]), k, i, q_len)
            top = s.amax(-1, keepdim=True) if k_len else s.new_full((*s.shape[:2], 1), float("-inf"))
            weights = torch.exp(s - top.masked_fill(top == float("-inf"), 0.0))
            total = weights.sum(-1, keepdim=True)
            result = torch.matmul(weights, v) / total.masked_fill(total == 0, 1.0)
            o[:, i : i + step] = result.masked_fill(total == 0, 0.0).to(o.dtype)
            rows_lse[:, i : i + step] = (top + torch.log(total))[..., 0]
    return out, lse


def backward(
    problem: Problem, operands: Operands, saved: Saved, config: NoConfig = _NO_CONFIG
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq, dk, dv), with the weights recomputed from LSE."""
    dq, dk, dv = (torch.zeros_like(x) for x in (operands.q, operands.k, operands.v))
    for b, q0, q_len, k0, k_len in _sequences(problem, operands.cu_seqlens_q, operands.cu_seqlens_k):
        q, o, do, dq_b = (_rows(x, problem, b, q0, q_len) for x in (operands.q, saved.out, saved.dout, dq))
        k, v = (wide(_rows(x, problem, b, k0, k_len)) for x in (operands.k, operands.v))
        k, v = (x.repeat_interleave(problem.group, 0) for x in (k, v))
        dk_b, dv_b = torch.zeros_like(k), torch.zeros_like(v)
        lse = _lse_rows(saved.lse, problem, b, q0, q_len)
        step = _chunk(problem, k_len)
        for i in range(0, q_len, step):
            rows = slice(i, i + step)
            q_i, do_i, o_i, lse_i = wide(q[:, rows]), wide(do[:, rows]), wide(o[:, rows]), lse[:, rows, None]
            s = _scores(problem, q_i, k, i, q_len)
            p = torch.exp(s - lse_i.masked_fill(lse_i == float("-inf"), 0.0))
            delta = (do_i * o_i).sum(-1, keepdim=True)
            if saved.dlse is not None:
                delta = delta - _lse_rows(saved.dlse, problem, b, q0, q_len)[:, rows, None]
            ds = p * (torch.matmul(do_i, v.transpose(-1, -2)) - delta)
            dv_b += torch.matmul(p.transpose(-1, -2), do_i)
            dk_b += torch.matmul(ds.transpose(-1, -2), q_i) * problem.scale
            dq_b[:, rows] = (torch.matmul(ds, k) * problem.scale).to(dq.dtype)
        for grad, of_heads in ((dk, dk_b), (dv, dv_b)):
            summed = of_heads.unflatten(0, (problem.kv_heads, problem.group)).sum(1)
            _rows(grad, problem, b, k0, k_len).copy_(summed)
    return dq, dk, dv


def _supports(problem: Problem, device: Device) -> str | None:
    if problem.packed and problem.device_type == "cuda":
        return "reads cu_seqlens on the host, which waits for the GPU"
    return None


BACKEND = Backend(
    name="reference",
    summary="torch, by the definition in float32: every dtype, CPU and GPU",
    forward=Direction(_supports, one_config, forward),
    backward=Direction(_supports, one_config, backward),
)
