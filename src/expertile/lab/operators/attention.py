"""attention in the lab: forward (q, k, v -> out) and backward (dout, q, k, v -> dq, dk, dv; out and LSE are there).
FLOPs are those of unmasked pairs: two products forward, five backward. The unfused rivals write all scores to memory.
"""

import math
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from expertile.device import Device
from expertile.lab.operators._binds import compiled, compiled_call, one
from expertile.lab.operators._rows import random
from expertile.lab.operators._supports import load, on_hopper, with_library
from expertile.lab.race.operator import ROUNDOFF, Call, Inputs, Operator, Rival, Supports, Workload, with_backward
from expertile.ops.attention import reference
from expertile.ops.attention.api import attention, attention_backward, attention_forward
from expertile.ops.attention.backend import Operands, Saved
from expertile.ops.attention.backends import by_name
from expertile.ops.attention.problem import Problem

_OURS = ("gluon_hopper", "triton")
_FA3 = ("fa3.so", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")  # FlashAttention 3 as vLLM builds it: forward alone
_MEMORY_LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)


def problem(w: Workload) -> Problem:
    """The workload as the operator sees it: contiguous tensors on a GPU."""
    batch, heads, kv_heads, dim = w["batch"], w["heads"], w["kv_heads"], w["head_dim"]
    q_len, k_len = w["q_len"], w["k_len"]
    q_strides = (heads * q_len * dim, q_len * dim, dim)
    k_strides = (kv_heads * k_len * dim, k_len * dim, dim)
    sizes, rows = (batch, heads, kv_heads, q_len, k_len, dim), (batch * q_len, batch * k_len)
    return Problem(*sizes, w.torch_dtype, w["causal"], dim**-0.5, False, *rows, q_strides, k_strides, k_strides)


def _inputs(w: Workload, device: torch.device, seed: int) -> Inputs:
    make, p = random(w, device, seed), problem(w)
    queries, keys = (p.batch, p.heads, p.q_len, p.head_dim), (p.batch, p.kv_heads, p.k_len, p.head_dim)
    return make(*queries), make(*keys), make(*keys)


def _backward_inputs(w: Workload, device: torch.device, seed: int) -> Inputs:
    q, k, v = _inputs(w, device, seed)
    return random(w, device, seed + 1)(*q.shape), q, k, v


def _backward_reference(w: Workload, inputs: Inputs) -> Inputs:
    dout, *qkv = (x.float() for x in inputs)
    p, wide = problem(w), Operands(*qkv)
    out, lse = reference.forward(p, wide)
    return reference.backward(p, wide, Saved(out, lse, dout))


def _tolerance(w: Workload) -> tuple[float, float]:
    """Scores or weights are rounded to the inputs' dtype between the products; unfused ones both."""
    return 3 * ROUNDOFF[w.dtype] + 1e-5, 12 * ROUNDOFF[w.dtype] + 1e-5


def _scores_nbytes(w: Workload) -> float:
    return float(w["batch"] * w["heads"] * w["q_len"] * w["k_len"] * w.itemsize)


def _row_nbytes(w: Workload, of_queries: int, of_keys: int) -> float:
    """Bytes of tensors like q and like k."""
    queries, keys = w["heads"] * w["q_len"] * of_queries, w["kv_heads"] * w["k_len"] * of_keys
    return float(w["batch"] * (queries + keys) * w["head_dim"] * w.itemsize)


def _fused_peak(w: Workload) -> float:
    """out, and a float32 for each row."""
    return _row_nbytes(w, 1, 0) + 4.0 * w["batch"] * w["heads"] * w["q_len"]


def _fused_backward_peak(w: Workload) -> float:
    """dq, dk, dv, and two float32 for each row, padded."""
    return _row_nbytes(w, 1, 2) + 8.0 * w["batch"] * w["heads"] * math.ceil(w["q_len"] / 128) * 128


def _unfused_peak(w: Workload) -> float:
    """The scores before and after softmax, and the scaled queries."""
    return 2.0 * _scores_nbytes(w) + _row_nbytes(w, 1, 0)


def _scores(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    s = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    if causal:
        queries, keys = s.shape[-2:]
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=s.device).triu(keys - queries + 1)
        s = s.masked_fill(hidden, float("-inf"))
    return s


def _of_group(q: Tensor, k: Tensor) -> Tensor:
    """Keys or values once for every query head."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def _unfused_plain(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    return torch.matmul(torch.softmax(_scores(q, _of_group(q, k), causal), -1), _of_group(q, v))


def _unfused_backward_plain(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What autograd does with the unfused forward, whose weights `p` it keeps."""
    scale, group = q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    dv = torch.matmul(p.transpose(-1, -2), dout)
    dp = torch.matmul(dout, _of_group(q, v).transpose(-1, -2))
    ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)
    dq = torch.matmul(ds, _of_group(q, k)) * scale
    dk = torch.matmul(ds.transpose(-1, -2), q) * scale
    if group > 1:
        dk, dv = (x.unflatten(1, (k.shape[1], group)).sum(2) for x in (dk, dv))
    return dq, dk, dv


def _own(w: Workload, backward: bool) -> str:
    """The fastest of our kernels that takes the workload where the tensors are; the choice's elsewhere."""
    device = Device.current()
    if device.kind != "cuda":
        return "auto"
    able = [n for n in _OURS if by_name(n).direction(backward).supports(problem(w), device) is None]
    return able[0] if able else "auto"


def _expertile(w: Workload, inputs: Inputs, own: bool) -> Call:
    q, k, v = inputs
    causal, backend = w["causal"], _own(w, False) if own else "auto"
    return lambda: (attention(q, k, v, causal=causal, backend=backend),)  # type: ignore[return-value]


def _expertile_backward(w: Workload, inputs: Inputs, own: bool) -> Call:
    dout, q, k, v = inputs
    backend = _own(w, True) if own else "auto"
    rest = (None, None, None, None, w["causal"], q.shape[-1] ** -0.5, False)
    out, lse = attention_forward(q, k, v, *rest, "auto")
    return lambda: attention_backward(q, k, v, *rest, backend, out, lse, dout, None)


def _sdpa(w: Workload, inputs: Inputs, kernel: SDPBackend) -> Call:
    q, k, v = inputs
    causal, grouped = w["causal"], w["heads"] != w["kv_heads"]

    def call() -> Inputs:
        with sdpa_kernel(kernel):
            return (F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped),)

    return call


def _sdpa_backward(w: Workload, inputs: Inputs, name: str) -> Call:
    """The same kernels as autograd runs, called by themselves so that a graph can capture them."""
    dout, q, k, v = inputs
    p, operands, backend = problem(w), Operands(q, k, v), by_name(name)
    config = backend.forward.configs(p, Device.current())[0]
    out, lse = backend.forward.run(p, operands, config)
    saved = Saved(out, lse, dout)
    return lambda: backend.backward.run(p, operands, saved, config)


def _fa3(w: Workload, inputs: Inputs) -> Call:
    """[tokens, heads, head_dim] is its layout, sequence after sequence: vLLM's build has no other. Returned in ours."""
    load(_FA3)
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in inputs)
    batch, longest = w["batch"], (w["q_len"], w["k_len"])
    starts = [torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length for length in longest]
    before = (*(None,) * 4, *starts, *(None,) * 3, *longest, *(None,) * 9)
    options, after = (w["head_dim"] ** -0.5, w["causal"], -1, -1), (0.0, True, None, 1, None, 0, None, 1, 0, None)

    def call() -> Inputs:
        out = torch.ops._vllm_fa3_C.fwd(q, k, v, *before, *options, *after)[0]
        return (out.unflatten(0, (batch, longest[0])).transpose(1, 2),)

    return call


def _fa3_supports(w: Workload, device: Device) -> str | None:
    if device.kind == "cuda" and device.capability != (9, 0):
        return "needs compute capability 9.0"
    return "knows bfloat16 and float16" if w.dtype not in ("bf16", "fp16") else on_hopper(w, device)


def _unfused_backward(w: Workload, inputs: Inputs, compiles: bool = False) -> Call:
    dout, q, k, v = inputs
    p = torch.softmax(_scores(q, _of_group(q, k), w["causal"]), -1)
    if compiles:
        return compiled_call(w, _unfused_backward_plain, dout, q, k, v, p)
    return lambda: _unfused_backward_plain(dout, q, k, v, p)


def _peer(name: str, backward: bool) -> Supports:
    def supports(w: Workload, device: Device) -> str | None:
        p, backend = problem(w), by_name(name)
        return backend.forward.supports(p, device) or (backend.backward.supports(p, device) if backward else None)

    return supports


def _with_scores(tensors: int) -> Supports:
    """Where so many tensors of scores fit memory."""

    def supports(w: Workload, device: Device) -> str | None:
        needed = tensors * _scores_nbytes(w)
        if device.kind == "cuda" and needed > 0.8 * device.memory_bytes:
            return f"holds {needed / 1e9:.0f} GB of scores, {device.name} has {device.memory_bytes / 1e9:.0f} GB"
        return None

    return supports


def workload(
    preset: str,
    batch: int,
    heads: int,
    length: int,
    head_dim: int,
    causal: bool,
    dtype: str = "bf16",
    kv_heads: int | None = None,
    note: str = "",
) -> Workload:
    """Self-attention of `length`, forward."""
    kv_heads = heads if kv_heads is None else kv_heads
    grouped = f"-HKV{kv_heads}" if kv_heads != heads else ""
    name = f"B{batch}-H{heads}{grouped}-L{length}-D{head_dim}-{dtype}" + "-causal" * causal
    lengths: dict[str, int] = {"q_len": length, "k_len": length, "head_dim": head_dim, "causal": causal}
    dims = {"batch": batch, "heads": heads, "kv_heads": kv_heads, **lengths}
    return Workload(name, preset, "attention", tuple(dims.items()), dtype, note)


def attention_v100() -> tuple[Workload, ...]:
    """Report 004's sizes: B=4, H=8, D=64, float16, length 256 to 2048."""
    lengths = (256, 512, 1024, 2048)
    return with_backward(
        workload("attention-v100", 4, 8, length, 64, False, "fp16", note="size of report 004") for length in lengths
    )


def attention_rows() -> tuple[Workload, ...]:
    """B=4, H=16 at head dimensions 64 and 128, causal or not, length 256 to 16384; and grouped heads."""
    shapes = product((64, 128), (False, True), (256, 1024, 2048, 4096, 16384))
    alike = [workload("attention", 4, 16, length, head_dim, causal) for head_dim, causal, length in shapes]
    grouped = [
        workload("attention", 2, 32, 4096, 128, True, kv_heads=8, note="heads of Llama 3 8B"),
        workload("attention", 1, 64, 8192, 128, True, kv_heads=8, note="heads of Llama 3 70B"),
    ]
    return with_backward(alike + grouped)


def memory_workloads() -> tuple[Workload, ...]:
    """One shape at lengths that double: what grows with the length, and what with its square."""
    return with_backward(workload("attention-memory", 1, 16, length, 64, False) for length in _MEMORY_LENGTHS)


OPERATORS = (
    Operator(
        "attention",
        _inputs,
        lambda w, inputs: reference.forward(problem(w), Operands(*(x.float() for x in inputs)))[:1],
        lambda w: problem(w).work(),
        (
            Rival("expertile", partial(_expertile, own=True), peer=False, peak_nbytes=_fused_peak),
            Rival("expertile-auto", partial(_expertile, own=False), peer=False),
            Rival("sdpa_fa2", partial(_sdpa, kernel=SDPBackend.FLASH_ATTENTION), _peer("sdpa_fa2", False)),
            Rival("sdpa_cudnn", partial(_sdpa, kernel=SDPBackend.CUDNN_ATTENTION), _peer("sdpa_cudnn", False)),
            Rival("fa3", _fa3, with_library(_FA3, _fa3_supports)),
            Rival("unfused", one(_unfused_plain, "causal"), _with_scores(3), peak_nbytes=_unfused_peak),
            Rival("torch.compile", compiled(_unfused_plain, "causal"), _with_scores(3)),
        ),
        _tolerance,
    ),
    Operator(
        "attention_backward",
        _backward_inputs,
        _backward_reference,
        lambda w: problem(w).backward_work(),
        (
            Rival("expertile", partial(_expertile_backward, own=True), peer=False, peak_nbytes=_fused_backward_peak),
            Rival("expertile-auto", partial(_expertile_backward, own=False), peer=False),
            Rival("sdpa_fa2", partial(_sdpa_backward, name="sdpa_fa2"), _peer("sdpa_fa2", True)),
            Rival("sdpa_cudnn", partial(_sdpa_backward, name="sdpa_cudnn"), _peer("sdpa_cudnn", True)),
            Rival("unfused", _unfused_backward, _with_scores(4), peak_nbytes=_unfused_peak),
            Rival("torch.compile", partial(_unfused_backward, compiles=True), _with_scores(4)),
        ),
        _tolerance,
    ),
)
PRESETS = {"attention-v100": attention_v100, "attention": attention_rows}
