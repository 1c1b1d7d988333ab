"""Whole models of transformers with random weights, made on the device, their experts in several formats; and the
routing of one pass kept for another."""

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
from expertile.integrations.transformers import register, replace_weight
from expertile.lab.race.gate import compare
from expertile.lab.race.operator import Verdict

DEQUANTISED = "dequantised"  # an experts_implementation: transformers' grouped_mm on the values of quantised weights
BATCHED_TOKENS = 16  # beyond, transformers' "batched_mm" copies more weights than there are
_PROJECTIONS = ("gate_up_proj", "down_proj")
_SCALE_BYTE = 120  # 2^-7: random e2m1 codes of standard deviation 2.9 become weights of 0.02


@dataclass(frozen=True)
class Plan:
    """A configuration of transformers, `<family>Config(**options)`. `packed`: its experts are random MXFP4 codes.
    `attention`: "eager" where the model takes no SDPA."""

    name: str
    family: str
    options: Mapping[str, Any]
    attention: str = "sdpa"
    packed: bool = False


# config.json of each on Hugging Face; what is not named here has no part in the experts
QWEN3 = Plan(
    "Qwen3-30B-A3B",
    "Qwen3Moe",
    dict(hidden_size=2048, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True),
)
GPT_OSS = Plan(
    "gpt-oss-120b",
    "GptOss",
    dict(hidden_size=2880, intermediate_size=2880, num_local_experts=128, num_experts_per_tok=4),
    attention="eager",
)


def named_experts(model: Any) -> list[tuple[str, Any]]:
    """The experts that transformers' `ExpertsInterface` runs, by name."""
    return [(name, m) for name, m in model.named_modules() if all(hasattr(m, p) for p in (*_PROJECTIONS, "has_gate"))]


def nbytes(module: Any) -> int:
    return sum(t.nbytes for t in (*module.parameters(), *module.buffers()))


def build(plan: Plan, device: torch.device, seed: int = 0) -> Any:
    """The causal language model in bfloat16. Weights have the variance 1 / inputs; norms are 1, biases small."""
    model, generator = _empty(plan), torch.Generator(device).manual_seed(seed)
    for module, last, like, weight_of in _places(model):
        if plan.packed and weight_of is not None:
            weight = Mxfp4Weight.empty(tuple(weight_of(like).shape), device)
            weight.packed.random_(0, 256, generator=generator)
            weight.scales.fill_(_SCALE_BYTE)
            replace_weight(module, last, weight)
            continue
        made = torch.empty(like.shape, dtype=like.dtype, device=device)
        if like.dim() == 1 and last == "weight":
            made.fill_(1.0)
        else:
            inputs = (
                100 if "bias" in last or last == "sinks" else (like if weight_of is None else weight_of(like)).shape[-1]
            )
            made.uniform_(-((3 / inputs) ** 0.5), (3 / inputs) ** 0.5, generator=generator)
        setattr(module, last, torch.nn.Parameter(made))
    return model.to(device).eval()


def quantised(model: Any, plan: Plan, format: str) -> Any:
    """A second model with the parameters of `model` itself, its experts rounded to `format` layer by layer."""
    other, held = _empty(plan), [own for _, _, own, _ in _places(model)]
    for (module, last, _, weight_of), parameter in zip(_places(other), held, strict=True):
        if weight_of is None:
            setattr(module, last, parameter)
        else:
            replace_weight(module, last, quantize(weight_of(parameter.detach()), format))
    return other.to(held[0].device).eval()


def _empty(plan: Plan) -> Any:
    register()
    import transformers
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS as functions

    grouped = functions["grouped_mm"]
    functions.register(DEQUANTISED, lambda self, *args: grouped(_Plain(self), *args))
    config = getattr(transformers, f"{plan.family}Config")(**plan.options)
    make = transformers.AutoModelForCausalLM.from_config
    with parameters_on_meta():
        return make(config, dtype=torch.bfloat16, attn_implementation=plan.attention)


def _places(model: Any) -> list[tuple[Any, str, Any, Any]]:
    """(module, name in it, parameter, of a weight of experts what makes it [E, rows, columns])."""
    found = []
    for name, parameter in model.named_parameters():
        owner, _, last = name.rpartition(".")
        module, weight_of = model.get_submodule(owner), None
        if last in _PROJECTIONS and parameter.dim() == 3:
            weight_of = (lambda w: w.mT) if module.is_transposed else (lambda w: w)
        found.append((module, last, parameter, weight_of))
    return found


class _Plain:
    """Experts with their weights as tensors, everything else their own."""

    def __init__(self, experts: Any) -> None:
        self._experts = experts
        for name in _PROJECTIONS:
            held = getattr(experts, name)
            if isinstance(held, QuantizedBuffers):
                held = held.weight.dequantize(torch.bfloat16)
                held = held.mT if experts.is_transposed else held
            setattr(self, name, held)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


@contextmanager
def routing(model: Any, kept: dict[int, tuple[Tensor, ...]]) -> Iterator[None]:
    """Inside, (ids, weights) of every layer are put in `kept`, or taken from there: else a rounding in one layer sends
    a token to another expert in the next, and logits differ by chance."""

    def hook(index: int) -> Any:
        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x, *own = (*args, *kwargs.values())
            return (x, *kept.setdefault(index, tuple(t.detach() for t in own))), {}

        return before

    found = enumerate(m for _, m in named_experts(model))
    hooks = [m.register_forward_pre_hook(hook(index), with_kwargs=True) for index, m in found]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def within(outputs: tuple[Tensor, ...], truth: tuple[Tensor, ...], limit: float) -> Verdict:
    """Relative Frobenius error at most `limit`, and no element's error a larger share of the largest."""
    return compare(outputs, tuple(t.float() for t in truth), (limit, limit))


def bring_sonicmoe() -> None:
    """Let transformers find the installed package where it would ask its hub. ImportError: there is none."""
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_general_routing_inputs
    from transformers.integrations import sonicmoe

    sonicmoe._SONICMOE = sonicmoe.SonicMoE(ActivationType, moe_general_routing_inputs)


@torch.no_grad()
def to_triton_kernels(model: Any, limit: float) -> Verdict:
    """transformers' own MXFP4 layers in the place of ours, layer by layer; what the gate says of the first."""
    import triton_kernels.matmul_ogs
    import triton_kernels.numerics_details.mxfp
    import triton_kernels.routing
    import triton_kernels.swiglu
    import triton_kernels.tensor_details.layout
    from transformers.integrations import mxfp4

    vars(mxfp4)["triton_kernels_hub"] = triton_kernels
    found: list[Verdict] = []
    for name, experts in named_experts(model):
        path = name.rpartition(".")[0]
        block, device = model.get_submodule(path), experts.down_proj_bias.device
        model.config._experts_implementation = DEQUANTISED
        x = torch.randn(1, 64, experts.hidden_size, device=device, dtype=torch.bfloat16)
        truth = () if found else (block(x)[0],)
        with torch.device("meta"):
            own = mxfp4.Mxfp4GptOssExperts(model.config)
        for projection in _PROJECTIONS:
            weight = getattr(experts, projection).weight
            delattr(experts, projection)
            blocks = torch.cat([weight.part(e, e + 1).blocks() for e in range(weight.shape[0])])
            mxfp4.swizzle_mxfp4_convertops(blocks, weight.scale_bytes(), own, projection, device, triton_kernels)
            bias = getattr(experts, f"{projection}_bias").detach().float()
            setattr(own, f"{projection}_bias", torch.nn.Parameter(bias, requires_grad=False))
        if hasattr(mxfp4, "Mxfp4GptOssMLP"):  # from transformers 5.18 on
            block = mxfp4.Mxfp4GptOssMLP(block.router, own)
            model.set_submodule(path, block)
        else:
            block.experts, block.forward = own, MethodType(vars(mxfp4)["mlp_forward"], block)
        if truth:
            found.append(within((block(x)[0],), truth, limit))
    return found[0]
