"""One forward pass of well-known models as a list of operator calls, from their published configurations.

Only operators of this package are listed: dense projections, embeddings and activations are the same either way.
`batch` sequences of `seq_len` tokens, prefill: every token attends within its sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Use:
    """`count` equal calls of an operator in one forward pass. `dims` as a record's shape has them; `unsupported`: a
    reason why this package does not compute it, or ""."""

    op: str
    dims: tuple[tuple[str, Any], ...]
    count: int
    where: str
    unsupported: str = ""


@dataclass(frozen=True)
class Model:
    """A model's name, where its configuration stands, and its calls for (batch, seq_len)."""

    name: str
    source: str
    dtype: str
    batch: int
    seq_len: int
    uses: Callable[[int, int], tuple[Use, ...]]


def _norm(op: str, rows: int, cols: int, count: int, where: str) -> Use:
    return Use(op, (("rows", rows), ("cols", cols)), count, where)


def _attention(
    batch: int, heads: int, kv_heads: int, length: int, dim: int, causal: bool, count: int, where: str = "attention"
) -> Use:
    dims = (
        ("batch", batch), ("heads", heads), ("kv_heads", kv_heads), ("q_len", length), ("k_len", length),
        ("head_dim", dim), ("causal", causal),
    )  # fmt: skip
    return Use("attention", dims, count, where)


def _experts(tokens: int, experts: int, top_k: int, hidden: int, ffn: int, layers: int) -> tuple[Use, Use]:
    """Gate and up projections in one product, then down."""

    def product(k: int, n: int, where: str) -> Use:
        dims = (("layout", "ragged_m"), ("groups", experts), ("m", tokens * top_k), ("n", n), ("k", k))
        return Use("grouped_mm", dims, layers, where)

    return product(hidden, 2 * ffn, "experts, gate and up"), product(ffn, hidden, "experts, down")


def _bert_base(batch: int, length: int) -> tuple[Use, ...]:
    tokens = batch * length
    return (
        _norm("layer_norm", tokens, 768, 25, "after embeddings and twice a layer"),
        _attention(batch, 12, 12, length, 64, False, 12),
    )


def _mixtral(batch: int, length: int) -> tuple[Use, ...]:
    tokens = batch * length
    return (
        _norm("rms_norm", tokens, 4096, 65, "twice a layer and at the end"),
        _attention(batch, 32, 8, length, 128, True, 32),
        *_experts(tokens, 8, 2, 4096, 14336, 32),
    )


def _deepseek_v3(batch: int, length: int) -> tuple[Use, ...]:
    tokens = batch * length
    latent = Use(
        "attention", (("batch", batch), ("heads", 128), ("q_len", length), ("head_dim", 192)), 61, "latent attention",
        "keys of 192 elements beside values of 128 are not supported",
    )  # fmt: skip
    return (
        _norm("rms_norm", tokens, 7168, 123, "twice a layer and at the end"),
        _norm("rms_norm", tokens, 1536, 61, "compressed queries"),
        _norm("rms_norm", tokens, 512, 61, "compressed keys and values"),
        latent,
        *_experts(tokens, 256, 8, 7168, 2048, 58),
    )


def _qwen3_30b(batch: int, length: int) -> tuple[Use, ...]:
    tokens = batch * length
    return (
        _norm("rms_norm", tokens, 2048, 97, "twice a layer and at the end"),
        _norm("rms_norm", tokens * 32, 128, 48, "queries, head by head"),
        _norm("rms_norm", tokens * 4, 128, 48, "keys, head by head"),
        _attention(batch, 32, 4, length, 128, True, 48),
        *_experts(tokens, 128, 8, 2048, 768, 48),
    )


def _gpt_oss_120b(batch: int, length: int) -> tuple[Use, ...]:
    tokens = batch * length
    attention = _attention(batch, 64, 8, length, 64, True, 36, "attention with sinks, every other layer windowed")
    sinks = Use(attention.op, attention.dims, attention.count, attention.where, "attention sinks are not supported")
    return (
        _norm("rms_norm", tokens, 2880, 73, "twice a layer and at the end"),
        sinks,
        *_experts(tokens, 128, 4, 2880, 2880, 36),
    )


_MODELS = (
    # Report 004's sizes: 32 sequences of 512 tokens in float32.
    Model("bert-base", "google-bert/bert-base-uncased, config.json", "fp32", 32, 512, _bert_base),
    Model("mixtral-8x7b", "mistralai/Mixtral-8x7B-v0.1, config.json", "bf16", 16, 512, _mixtral),
    Model("deepseek-v3", "deepseek-ai/DeepSeek-V3, config.json", "bf16", 16, 512, _deepseek_v3),
    Model("qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B, config.json", "bf16", 16, 512, _qwen3_30b),
    Model("gpt-oss-120b", "openai/gpt-oss-120b, config.json", "bf16", 16, 512, _gpt_oss_120b),
)
MODELS: Mapping[str, Model] = MappingProxyType({model.name: model for model in _MODELS})
