"""Whole models of transformers with random weights, made on the device: their experts in several formats, and the
routing of one pass kept for another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from expertile.formats.fp8 import QuantizedBuffers
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.formats.weight_only import quantize
from expertile.integrations.checkpoints import parameters_on_meta
from expertile.integrations.transformers import NAME, register, replace_weight
from expertile.lab.race.gate import compare
from expertile.lab.race.operator import Verdict

DEQUANTISED = "dequantised"
PROJECTIONS = ("gate_up_proj", "down_proj")
_SCALE_BYTE = 120  # 2^-7: a random e2m1 code of standard deviation 2.9 becomes a weight of 0.02


@dataclass(frozen=True)
class Plan:
    """A configuration of transformers, `<family>Config(**options)`. `packed`: its experts are random MXFP4 blocks.
    `attention`: what transformers calls it; "eager" where the model takes no SDPA."""

    name: str
    family: str
    options: Mapping[str, Any]
    attention: str = "sdpa"
    packed: bool = False


def build(plan: Plan, device: torch.device, seed: int = 0) -> Any:
    """The causal language model in bfloat16. Weights are uniform with the variance 1 / inputs, norms 1, biases small."""
    import transformers

    register()
    _register_reference()
    config = getattr(transformers, f"{plan.family}Config")(**plan.options)
    with parameters_on_meta():
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=plan.attention
        )
    generator = torch.Generator(device).manual_seed(seed)
    of_experts = {f"{name}.{p}" for name, _ in named_experts(model) for p in PROJECTIONS}
    for name, like in list(model.named_parameters()):
        owner, _, last = name.rpartition(".")
        module = model.get_submodule(owner)
        transposed = name in of_experts and module.is_transposed
        if plan.packed and name in of_experts:
            replace_weight(module, last, _blocks(like.mT.shape if transposed else like.shape, device, generator))
            continue
        made = torch.empty(like.shape, dtype=like.dtype, device=device)
        if like.dim() == 1 and last == "weight":
            made.fill_(1.0)
        else:
            fan_in = (
                100 if last in ("bias", "sinks") or last.endswith("_bias") else like.shape[-2 if transposed else -1]
            )
            made.uniform_(-((3 / fan_in) ** 0.5), (3 / fan_in) ** 0.5, generator=generator)
        setattr(module, last, torch.nn.Parameter(made))
    return model.to(device).eval()


def _blocks(shape: tuple[int, ...], device: torch.device, generator: torch.Generator) -> Mxfp4Weight:
    experts, rows, columns = shape
    codes = (experts, rows, columns // 32, 16)
    blocks = torch.empty(codes, dtype=torch.uint8, device=device).random_(0, 256, generator=generator)
    return Mxfp4Weight.from_blocks(blocks, torch.full(codes[:-1], _SCALE_BYTE, dtype=torch.uint8, device=device))


def quantised(model: Any, plan: Plan, format: str) -> Any:
    """A second model with the parameters of `model` itself, its experts rounded to `format` layer by layer."""
    import transformers

    with parameters_on_meta():
        other = transformers.AutoModelForCausalLM.from_config(
            type(model.config)(**plan.options), dtype=torch.bfloat16, attn_implementation=plan.attention
        )
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        module = other.get_submodule(owner)
        if last in PROJECTIONS and parameter.dim() == 3:
            weight = parameter.detach()
            replace_weight(module, last, quantize(weight.mT if module.is_transposed else weight, format))
        else:
            setattr(module, last, parameter)
    return other.to(next(model.parameters()).device).eval()


def named_experts(model: Any) -> list[tuple[str, Any]]:
    return [
        (n, m) for n, m in model.named_modules() if all(hasattr(m, p) for p in PROJECTIONS) and hasattr(m, "has_gate")
    ]


def nbytes(*modules: Any) -> int:
    """Of all parameters and buffers."""
    return sum(t.nbytes for m in modules for t in (*m.parameters(), *m.buffers()))


class _Plain:
    """Experts with their weights as tensors, everything else their own."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts
        for name in PROJECTIONS:
            held = getattr(experts, name)
            if isinstance(held, QuantizedBuffers):
                held = held.weight.dequantize(torch.bfloat16)
                held = held.mT if experts.is_transposed else held
            setattr(self, name, held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


def _register_reference() -> None:
    """experts_implementation="dequantised": transformers' grouped_mm, of quantised weights on their values."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    grouped = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    ALL_EXPERTS_FUNCTIONS.register(DEQUANTISED, lambda self, *args: grouped(_Plain(self), *args))


@contextmanager
def routing(model: Any, kept: dict[int, tuple[Tensor, ...]]) -> Iterator[None]:
    """Keeps (ids, weights) of every layer in `kept`; where they are there, the experts are called with them. Without
    that a rounding in one layer sends a token to another expert in the next, and logits differ by chance."""

    def hook(index: int) -> Any:
        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x, *own = (*args, *kwargs.values())
            kept.setdefault(index, tuple(t.detach() for t in own))
            return (x, *kept[index]), {}

        return before

    found = enumerate(m for _, m in named_experts(model))
    hooks = [m.register_forward_pre_hook(hook(i), with_kwargs=True) for i, m in found]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def within(outputs: tuple[Tensor, ...], truth: tuple[Tensor, ...], limit: float) -> Verdict:
    """Relative Frobenius error at most `limit`, the largest error of an element at most as large a share of the
    largest."""
    return compare(outputs, tuple(t.float() for t in truth), (limit, limit))


def bring(implementation: str) -> None:
    """Let transformers find a package where it would ask its hub. ImportError: there is none."""
    if implementation == "sonicmoe":
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import moe_general_routing_inputs
        from transformers.integrations import sonicmoe

        sonicmoe._SONICMOE = sonicmoe.SonicMoE(ActivationType, moe_general_routing_inputs)


@torch.no_grad()
def to_triton_kernels(model: Any, tolerance: float) -> Verdict:
    """transformers' own MXFP4 layers in the place of ours, layer by layer; what the gate says of the first."""
    import triton_kernels.matmul_ogs
    import triton_kernels.numerics_details.mxfp
    import triton_kernels.routing
    import triton_kernels.swiglu
    import triton_kernels.tensor_details.layout
    from transformers.integrations import mxfp4

    mxfp4.triton_kernels_hub = hub = triton_kernels
    verdict = None
    for name, experts in named_experts(model):
        block = model.get_submodule(name.rpartition(".")[0])
        device = experts.down_proj_bias.device
        x = torch.randn(1, 64, experts.hidden_size, device=device, dtype=torch.bfloat16)
        if verdict is None:
            model.config._experts_implementation = DEQUANTISED
            truth = block(x)[0]
        with torch.device("meta"):
            own = mxfp4.Mxfp4GptOssExperts(model.config)
        for projection in PROJECTIONS:
            weight = getattr(experts, projection).weight
            delattr(experts, projection)
            mxfp4.swizzle_mxfp4_convertops(weight.blocks(), weight.scale_bytes(), own, projection, device, hub)
            bias = getattr(experts, f"{projection}_bias").detach().float()
            setattr(own, f"{projection}_bias", torch.nn.Parameter(bias, requires_grad=False))
        if hasattr(mxfp4, "mlp_forward"):  # transformers 5.17
            block.experts, block.forward = own, MethodType(mxfp4.mlp_forward, block)
        else:
            model.set_submodule(name.rpartition(".")[0], mxfp4.Mxfp4GptOssMLP(block.router, own))
        if verdict is None:
            changed = model.get_submodule(name.rpartition(".")[0])
            verdict = within((changed(x)[0],), (truth,), tolerance)
    assert verdict is not None
    return verdict


__all__ = ["NAME", "Plan", "bring", "build", "quantised", "routing", "to_triton_kernels", "within"]
