"""How many top-1 tokens a small MoE model keeps when its experts are quantised: FP8, MXFP4, INT4 of each group size.

    python tools/quantised_models.py [--device cuda] [--layers 4] [--hidden 512] [--experts 8] [--embedding-std 1]

Needs `transformers` 5, but nothing from the network: a Mixtral is built from a configuration, with random weights drawn
from a seed, and read with random tokens. Its experts are then replaced one way after another, by `scaled_grouped_mm`
with e4m3 weights (128×128 scales; activations quantised 1×128 on the way) or by `weight_only_mm`, and for every
position the most likely next token is compared with that of the unquantised model. A line of JSON for each way; the
exit status is 1 if FP8 keeps fewer than `--least` (99 %) of them.

Random weights are a hard test, since a random model is sure of nothing: the gap between its two likeliest tokens is a
fraction of the spread of its logits. With every weight of standard deviation 0.02, transformers' default, the experts
make up most of the residual stream, and bfloat16 arithmetic alone keeps only some 97 % of float32's tokens; no 8-bit
format can be asked for 99 % there. With embeddings of standard deviation 1, as `torch.nn.Embedding` draws them, a layer
adds a small part to the stream, as layers of trained models do. That is the default here; `--embedding-std 0.02` asks
the hard question. The first line printed is what bfloat16 keeps of float32, beside which the others are to be read.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from expertile.formats.int4 import Int4Weight
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.formats.mxfp4_fp8 import Mxfp4Fp8Weight
from expertile.ops.quantize.api import quantize_activations, quantize_weights
from expertile.ops.scaled_grouped_mm.api import scaled_grouped_mm
from expertile.ops.weight_only_mm.api import weight_only_mm

# A product of rows in expert order with all experts' weights: (rows [R, K], offs [E]) -> [R, N].
Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """A Mixtral: hidden size a multiple of 128, as its experts' (twice that) then is."""

    layers: int = 4
    hidden: int = 512
    experts: int = 8
    top_k: int = 2
    vocabulary: int = 512
    embedding_std: float = 1.0
    seed: int = 0


def build(shape: Shape, device: torch.device) -> Any:
    """The model in bfloat16, in evaluation mode."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(  # type: ignore[call-arg]
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.hidden // 64,
        num_key_value_heads=shape.hidden // 128,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        max_position_embeddings=1024,
        experts_implementation="eager",
    )
    torch.manual_seed(shape.seed)
    model = MixtralForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=shape.embedding_std)
    return model.to(device=device, dtype=torch.bfloat16).eval()  # type: ignore[call-arg]


class QuantisedExperts(torch.nn.Module):
    """In the place of `MixtralExperts`: the same feed-forward, its two products by `product(weights)` each."""

    def __init__(self, experts: Any, product: Callable[[torch.Tensor], Product]) -> None:
        super().__init__()
        self.experts = experts.gate_up_proj.shape[0]
        self.gate_up = product(experts.gate_up_proj.detach())
        self.down = product(experts.down_proj.detach())

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H], [T, k], [T, k] -> [T, H]"""
        top_k = top_k_index.shape[1]
        order = top_k_index.flatten().sort(stable=True).indices
        counts = torch.bincount(top_k_index.flatten(), minlength=self.experts)
        offs = counts.cumsum(0).to(torch.int32)
        tokens = order // top_k
        gate, up = self.gate_up(hidden_states[tokens], offs).chunk(2, -1)
        out = self.down(torch.nn.functional.silu(gate) * up, offs) * top_k_weights.flatten()[order, None]
        return torch.zeros_like(hidden_states).index_add_(0, tokens, out.to(hidden_states.dtype))


def of_fp8(b: Any, scale_b: torch.Tensor | None = None) -> Product:
    """b as `scaled_grouped_mm` takes it; activations quantised to e4m3, 128 a scale, at every call."""

    def product(x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        a = quantize_activations(x)
        return scaled_grouped_mm(a.values, b, a.scales, scale_b, offs=offs)

    return product


def fp8(weights: torch.Tensor) -> Product:
    """weights [E, N, K] in e4m3."""
    w = quantize_weights(weights)
    return of_fp8(w.values.transpose(-2, -1), w.scales)


def int4(weights: torch.Tensor, group_size: int | None, symmetric: bool = True) -> Product:
    """weights [E, N, K] in 4 bits; `group_size` None: one scale for each row."""
    w = Int4Weight.quantize(weights, group_size, symmetric)
    return lambda x, offs: weight_only_mm(x, w, offs=offs)


def mxfp4(weights: torch.Tensor) -> Product:
    """weights [E, N, K] in e2m1, 32 values a scale."""
    w = Mxfp4Weight.quantize(weights)
    return lambda x, offs: weight_only_mm(x, w, offs=offs)


WAYS: Mapping[str, Callable[[torch.Tensor], Product]] = {
    "fp8": fp8,
    "int4 group 32": partial(int4, group_size=32),
    "int4 group 64": partial(int4, group_size=64),
    "int4 group 128": partial(int4, group_size=128),
    "int4 per channel": partial(int4, group_size=None),
    "int4 group 128 with zero points": partial(int4, group_size=128, symmetric=False),
    "int4 group 128, e4m3 activations": lambda weights: of_fp8(Int4Weight.quantize(weights, 128)),
    "mxfp4": mxfp4,
    "mxfp4, e4m3 activations": lambda weights: of_fp8(Mxfp4Fp8Weight.of(Mxfp4Weight.quantize(weights))),
}


@torch.no_grad()
def kept(model: Any, ways: Mapping[str, Callable[[torch.Tensor], Product]], tokens: torch.Tensor) -> dict[str, float]:
    """By way the share of positions of `tokens` [B, L] whose likeliest next token stays the same."""
    truth = model(tokens).logits.argmax(-1)
    blocks = [layer.mlp for layer in model.model.layers]
    originals = [block.experts for block in blocks]
    shares = {}
    for name, product in ways.items():
        for block, experts in zip(blocks, originals, strict=True):
            block.experts = QuantisedExperts(experts, product)
        shares[name] = float((model(tokens).logits.argmax(-1) == truth).float().mean())
        for block, experts in zip(blocks, originals, strict=True):
            block.experts = experts
    return shares


@torch.no_grad()
def kept_by_bf16(model: Any, tokens: torch.Tensor) -> float:
    """The share of float32's top-1 tokens that bfloat16 arithmetic keeps, with the same weights."""
    wide = deepcopy(model).float()
    return float((wide(tokens).logits.argmax(-1) == model(tokens).logits.argmax(-1)).float().mean())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for field in fields(Shape):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=type(field.default), default=field.default)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--least", type=float, default=0.99, help="share of tokens that FP8 must keep")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    shape = Shape(**{field.name: getattr(options, field.name) for field in fields(Shape)})
    device = torch.device(options.device)
    length = min(256, options.positions)
    generator = torch.Generator().manual_seed(shape.seed)
    tokens = torch.randint(shape.vocabulary, (options.positions // length, length), generator=generator).to(device)
    model = build(shape, device)
    shares = {"bf16 against float32": kept_by_bf16(model, tokens), **kept(model, WAYS, tokens)}
    for name, share in shares.items():
        print(json.dumps({"experts": name, "top1_kept": share, "positions": tokens.numel()}))
    return 0 if shares["fp8"] >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
