"""One forward pass of well-known models as calls of this package's operators, from their published configurations.

Dense projections, embeddings and activations are left out. `batch` sequences of `seq_len` tokens, prefill: every token
attends within its sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """A model's name, where its configuration stands, and its calls.

    `norms`: (rows per token, columns, calls, where). `attention`: (heads, heads of keys, head dimension, causal, calls,
    where, why it is not supported). `experts`: (experts, top-k, hidden, FFN, layers).
    """

    name: str
    source: str
    norm: str
    norms: tuple[tuple[int, int, int, str], ...]
    attention: tuple[int, int, int, bool, int, str, str]
    experts: tuple[int, int, int, int, int] | None = None
    dtype: str = "bf16"
    batch: int = 16
    seq_len: int = 512

    def uses(self, batch: int, seq_len: int) -> tuple[Use, ...]:
        """The calls of one pass."""
        tokens = batch * seq_len
        found = [
            Use(self.norm, (("rows", tokens * rows), ("cols", cols)), calls, where)
            for rows, cols, calls, where in self.norms
        ]
        heads, kv_heads, head_dim, causal, count, where, unsupported = self.attention
        sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": seq_len, "k_len": seq_len}
        dims = (*sizes.items(), ("head_dim", head_dim), ("causal", causal))
        found.append(Use("attention", dims, count, where, unsupported))
        if self.experts is not None:
            groups, top_k, hidden, ffn, layers = self.experts
            for k, n, where in ((hidden, 2 * ffn, "experts, gate and up"), (ffn, hidden, "experts, down")):
                of_group = {"layout": "ragged_m", "groups": groups, "m": tokens * top_k, "n": n, "k": k}
                found.append(Use("grouped_mm", tuple(of_group.items()), layers, where))
        return tuple(found)


_TWICE = "twice a layer and at the end"
_MODELS = (
    # Report 004's sizes: 32 sequences of 512 tokens in float32.
    Model(
        "bert-base",
        "google-bert/bert-base-uncased, config.json",
        "layer_norm",
        ((1, 768, 25, "after embeddings and twice a layer"),),
        (12, 12, 64, False, 12, "attention", ""),
        dtype="fp32",
        batch=32,
    ),
    Model(
        "mixtral-8x7b",
        "mistralai/Mixtral-8x7B-v0.1, config.json",
        "rms_norm",
        ((1, 4096, 65, _TWICE),),
        (32, 8, 128, True, 32, "attention", ""),
        (8, 2, 4096, 14336, 32),
    ),
    Model(
        "deepseek-v3",
        "deepseek-ai/DeepSeek-V3, config.json",
        "rms_norm",
        ((1, 7168, 123, _TWICE), (1, 1536, 61, "compressed queries"), (1, 512, 61, "compressed keys and values")),
        (128, 128, 192, True, 61, "latent attention", "keys of 192 elements beside values of 128 are not supported"),
        (256, 8, 7168, 2048, 58),
    ),
    Model(
        "qwen3-30b-a3b",
        "Qwen/Qwen3-30B-A3B, config.json",
        "rms_norm",
        ((1, 2048, 97, _TWICE), (32, 128, 48, "queries, head by head"), (4, 128, 48, "keys, head by head")),
        (32, 4, 128, True, 48, "attention", ""),
        (128, 8, 2048, 768, 48),
    ),
    Model(
        "gpt-oss-120b",
        "openai/gpt-oss-120b, config.json",
        "rms_norm",
        ((1, 2880, 73, _TWICE),),
        (64, 8, 64, True, 36, "attention with sinks, every other layer windowed", "attention sinks are not supported"),
        (128, 4, 2880, 2880, 36),
    ),
)
MODELS: Mapping[str, Model] = MappingProxyType({model.name: model for model in _MODELS})
