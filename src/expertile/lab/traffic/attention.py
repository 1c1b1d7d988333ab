"""Traffic of attention, B batches of H query heads over Hkv key heads, Lq queries and Lk keys of D elements.

The scores of all heads are B * H * Lq * Lk elements: what every way but a fused kernel writes to memory and reads back.
torch's ways as of PyTorch 2.11: `_scaled_dot_product_attention_math` and `_safe_softmax` in
aten/src/ATen/native/transformers/attention.cpp; FlashAttention 2 in aten/src/ATen/native/transformers/cuda/flash_attn
(forward kernel; backward: dot_do_o, dq_dk_dv, convert_dq).
"""

from dataclasses import dataclass, replace

from expertile.device import Device
from expertile.lab.operators.attention import problem
from expertile.lab.race.operator import Workload
from expertile.lab.traffic.model import OURS, TORCH, UNFUSED, Formula, Step, Way

MATH = "torch math"  # SDPA's backend of that name
_ATTENTION_CPP = "aten/src/ATen/native/transformers/attention.cpp"
_FLASH = "aten/src/ATen/native/transformers/cuda/flash_attn"
_BLOCK = 128  # queries of one block of a fused kernel: each reads all keys that it sees


@dataclass(frozen=True)
class _Sizes:
    """Bytes of q (out, dout, dq), of k (v, dk, dv), of the scores and of a float32 for every row; FLOPs of one product,
    masked pairs included and left out."""

    q: float
    k: float
    scores: float
    row: float
    product: float
    useful: float
    again: float


def _sizes(s: Workload) -> _Sizes:
    b, h, kv, lq, lk, d = (s[key] for key in ("batch", "heads", "kv_heads", "q_len", "k_len", "head_dim"))
    q, k = float(b * h * lq * d * s.itemsize), float(b * kv * lk * d * s.itemsize)
    product, useful = 2.0 * b * h * lq * lk * d, problem(s).work().flops / 2
    # Every block of queries of every head reads the keys and values that it sees; once they come from memory.
    seen = 2.0 * b * h * -(-lq // _BLOCK) * lk * d * s.itemsize * useful / product
    return _Sizes(q, k, float(b * h * lq * lk * s.itemsize), 4.0 * b * h * lq, product, useful, max(seen - 2 * k, 0.0))


def _expanded(s: Workload, k: float) -> tuple[tuple[Step, ...], float]:
    """Steps that repeat k and v, of `k` bytes each, for every query head where heads share them, and the bytes of k
    after that."""
    group = s["heads"] // s["kv_heads"]
    return (() if group == 1 else (Step("repeat k, v", 2 * k, 2 * group * k, launches=2),)), group * k


def _masked(s: Workload, z: _Sizes, n: float) -> tuple[Step, ...]:
    """A boolean mask on n scores."""
    return (Step("mask", z.scores + s["q_len"] * s["k_len"], z.scores, n),) if s["causal"] else ()


def _forward(s: Workload, device: Device) -> tuple[Way, ...]:
    z = _sizes(s)
    n = z.scores / s.itemsize
    repeat, k = _expanded(s, z.k)
    unfused = Way(
        UNFUSED,
        (
            *repeat,
            Step("q @ k^T", z.q + k, z.scores, z.product),
            Step("scale", z.scores, z.scores, n),
            *_masked(s, z, n),
            Step("softmax", z.scores, z.scores, 5 * n),
            Step("p @ v", z.scores + k, z.q, z.product),
        ),
        note="the softmax alone is fused",
    )
    fused = Step("", z.q + 2 * z.k, z.q + z.row, 2 * z.useful + 5 * n * z.useful / z.product, z.again)
    flash = Way(
        TORCH, (replace(fused, name="flash_fwd_kernel"),), _FLASH, "SDPA's FlashAttention 2; cuDNN's moves the same"
    )
    ours = Way(OURS, (replace(fused, name="attention"),))
    return unfused, _math(s, z, n), flash, ours


def _math(s: Workload, z: _Sizes, n: float) -> Way:
    """SDPA's math backend: 16-bit inputs in float32, the scale in q and k, a search for rows that are masked whole."""
    wide = 4 / s.itemsize
    q, scores = wide * z.q, wide * z.scores
    narrow = s.itemsize < 4
    up = (Step("to float32", z.q + 2 * z.k, wide * (z.q + 2 * z.k), launches=3),) if narrow else ()
    down = (Step("p to 16 bits", scores, z.scores), Step("out to 16 bits", q, z.q)) if narrow else ()
    repeat, k = _expanded(s, wide * z.k)
    mask_elements = s["q_len"] * s["k_len"]
    causal: tuple[Step, ...] = ()
    if s["causal"]:
        causal = (
            Step("ones, tril", mask_elements, 2.0 * mask_elements, launches=2),
            Step("where(-inf, 0)", mask_elements, 4.0 * mask_elements),
            Step("add mask", scores + 4.0 * mask_elements, scores, n),
        )
    steps = (
        *up,
        *repeat,
        Step("q * sqrt(scale)", q, q, q / 4),
        Step("k * sqrt(scale)", k, k, k / 4),
        Step("q @ k^T", q + k, scores, z.product),
        *causal,
        Step("softmax", scores, scores, 5 * n),
        Step("isneginf", scores, n, n),
        Step("all", n, n / s["k_len"], n),
        Step("where(all masked, 0, p)", scores + n / s["k_len"], scores),
        Step("p @ v", scores + k, q, z.product),
        *down,
    )
    return Way(MATH, steps, _ATTENTION_CPP, "_safe_softmax looks for rows that are masked as a whole")


def _backward(s: Workload, device: Device) -> tuple[Way, ...]:
    z = _sizes(s)
    n = z.scores / s.itemsize
    unfused = Way(
        UNFUSED,
        (
            Step("dv = p^T @ dout", z.scores + z.q, z.k, z.product),
            Step("dp = dout @ v^T", z.q + z.k, z.scores, z.product),
            Step("softmax backward", 2 * z.scores, z.scores, 4 * n),
            *_masked(s, z, n),
            Step("scale", z.scores, z.scores, n),
            Step("dq = ds @ k", z.scores + z.k, z.q, z.product),
            Step("dk = ds^T @ q", z.scores + z.q, z.k, z.product),
        ),
        note="the forward pass has kept p, as large as the scores",
    )
    inputs = 2 * z.q + 2 * z.k + 2 * z.row  # q, dout, k, v and two statistics
    wide_q = z.q * 4 / s.itemsize
    flash = Way(
        TORCH,
        (
            Step("flash_bwd_dot_do_o", 2 * z.q, z.row + wide_q, 2 * z.q / s.itemsize),
            Step("flash_bwd_dq_dk_dv", inputs + wide_q, 2 * z.k + wide_q, 5 * z.useful, 2 * z.again),
            Step("flash_bwd_convert_dq", wide_q, z.q),
        ),
        _FLASH,
        "FlashAttention 2 adds to a float32 dq with atomics: cleared, added to, converted",
    )
    elements = z.q / s.itemsize
    ours = Way(
        OURS,
        (
            Step("statistics", 2 * z.q + z.row, 2 * z.row, 2 * elements),
            Step("attention_dkdv", inputs, 2 * z.k, 4 * z.useful, z.again),
            Step("attention_dq", inputs, z.q, 3 * z.useful, z.again),
        ),
        note="no atomics: S and dP are computed twice, seven products for five",
    )
    return unfused, flash, ours


def _check(s: Workload) -> None:
    if s["heads"] % s["kv_heads"]:
        raise ValueError(f"heads: expected a multiple of the {s['kv_heads']} key heads, got {s['heads']}")


_DIMS = {"batch": 4, "heads": 16, "kv_heads": 16, "q_len": 4096, "k_len": 4096, "head_dim": 128, "causal": False}

FORMULAS = (
    Formula("attention", _DIMS, _forward, _check, ("bf16", "fp16")),
    Formula("attention_backward", _DIMS, _backward, _check, ("bf16", "fp16")),
)
