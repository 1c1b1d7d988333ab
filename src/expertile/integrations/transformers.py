"""Hugging Face transformers: the experts of its models on expertile.

    from expertile.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="expertile")

transformers (5.7 and later) hands the experts of a Mixture-of-Experts model, once the router has chosen, to a function
of its `ExpertsInterface`, (module, x [T, H], ids [T, k], weights [T, k]) -> [T, H]. The module describes its weights:

| attribute            | meaning                                                                          |
|----------------------|----------------------------------------------------------------------------------|
| has_gate             | gate_up_proj [E, 2I, H] and a gate; otherwise up_proj [E, I, H] and act_fn alone |
| is_transposed        | stored [E, H, 2I] and [E, I, H]: taken as they are, through strides              |
| has_bias             | gate_up_proj_bias [E, 2I] (up_proj_bias [E, I]) and down_proj_bias [E, H]        |
| has_post_expert_norm | post_expert_norm is applied to each expert's result before it is weighted        |
| _apply_gate          | pre [R, 2I] -> [R, I], whatever it computes                                      |

Where the gate is one that the kernels know, everything is `moe_mlp`. Otherwise the products are expertile's and what
stands between them is the module's own: up-projection with gathered rows, gate, grouped down-projection, combine. Ids
that are no expert's (expert parallelism marks so what other ranks compute) are dropped.

`quantize_experts(model, "mxfp4")` rounds the weights of all such experts, in place.

Experts that transformers holds in FP8 (`FineGrainedFP8Config`, blocks of 128×128) run as `Fp8Blocks`.
"""

import re
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from expertile.formats.fp8 import Fp8Blocks, QuantizedBuffers
from expertile.formats.weight_only import quantize
from expertile.moe.expert_weights import autocasts
from expertile.moe.experts import moe_mlp
from expertile.moe.lora import Lora
from expertile.moe.permute import Permutation, permutation
from expertile.ops.gathered_mm.activation import GPT_OSS_LIMIT, GPT_OSS_SCALE
from expertile.ops.gathered_mm.api import gathered_mm
from expertile.ops.gathered_mm.combine import combine
from expertile.ops.grouped_mm.api import grouped_mm

NAME = "expertile"
OLDEST = (5, 7)

# What `act_fn` may be under transformers' own gate, act_fn(gate) * up of two halves, for a kernel to take its place.
_ACTIVATIONS = {
    "torch.nn.functional.silu": "swiglu",
    "torch.nn.modules.activation.SiLU": "swiglu",
    "transformers.activations.SiLUActivation": "swiglu",
    "transformers.activations.GELUTanh": "geglu",
    "transformers.activations.NewGELUActivation": "geglu",
    "torch.nn.modules.activation.ReLU": "reglu",
}
_DEFAULT_GATE = "transformers.integrations.moe._default_apply_gate"
_FP8_GATE = "transformers.integrations.finegrained_fp8.FP8Experts._apply_gate"
# Gates of the form of gpt-oss's: whether their columns are interleaved, and where they keep scale and limit.
_CLAMPED_GATES = {
    "transformers.models.gpt_oss.modeling_gpt_oss.GptOssExperts._apply_gate": (True, "alpha", "limit"),
    "transformers.models.openai_privacy_filter.modeling_openai_privacy_filter.OpenAIPrivacyFilterExperts._apply_gate": (
        False,
        "alpha",
        "limit",
    ),
    "transformers.models.minimax_m3_vl.modeling_minimax_m3_vl.MiniMaxM3VLExperts._apply_gate": (
        False,
        "swiglu_alpha",
        "swiglu_limit",
    ),
}
PROJECTIONS = ("gate_up_proj", "down_proj")
_WEIGHTS = frozenset(f"{name}{bias}" for name in ("gate_up_proj", "up_proj", "down_proj") for bias in ("", "_bias"))


def register() -> None:
    """Make `experts_implementation="expertile"` known to transformers. Calling it again changes nothing.

    Raises:
        ImportError: transformers is missing or older than 5.7.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError("transformers is not installed: pip install 'transformers>=5.7'") from error
    _require_version(transformers.__version__)
    from transformers.integrations import finegrained_fp8
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, fp8_experts_forward)


def quantize_experts(model: Any, format: str) -> Any:
    """Round the weights of all experts of `model` to "mxfp4", "mxfp4_fp8" (MXFP4 beside activations in FP8), "int4" or
    "fp8" (with activations in FP8 too), in place, a layer at a time; returns it.

    Each weight becomes `QuantizedBuffers`, [E, rows, columns] whatever the module's order was, with state_dict keys of
    its own (`gate_up_proj.packed`, …): to read a saved state_dict back, quantise a model of the same config first. The
    model then runs with experts_implementation="expertile" only, in bfloat16 or float16. All other parameters stay as
    they are and trainable.

    Raises:
        ValueError: a model without experts of the kind above, or with some whose gate no kernel has or whose sizes the
            format does not take, which leaves the model as it was; later, its `save_pretrained`.
    """
    register()
    is_module = isinstance(model, torch.nn.Module)
    if not is_module:
        raise ValueError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    found = {name: m for name, m in model.named_modules() if _holds_experts(m)}
    if not found:
        raise ValueError("model: expected experts with gate_up_proj and down_proj parameters [E, …, …], got none")
    sizes = {}
    for name, experts in found.items():
        require_gate(name, experts)
        sizes.update({weight.shape[1:]: weight[:1] for weight in _projections(experts).values()})
    for weight in sizes.values():
        quantize(weight, format)
    for experts in found.values():
        for projection, weight in _projections(experts).items():
            replace_weight(experts, projection, quantize(weight, format))
    refuse_to_save(model)
    model.set_experts_implementation(NAME)
    return model


def _projections(experts: Any) -> dict[str, torch.Tensor]:
    """Weights by name, [E, rows, columns]."""
    found = {name: getattr(experts, name).detach() for name in PROJECTIONS}
    return {name: weight.mT if experts.is_transposed else weight for name, weight in found.items()}


def refuse_to_save(model: Any) -> None:
    """Make transformers' `save_pretrained` say that it has no format for quantised experts: it would fail, or drop
    them. PEFT's around it keeps adapters alone."""
    from transformers import PreTrainedModel

    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.save_pretrained = _cannot_save  # type: ignore[method-assign]


def _cannot_save(*args: Any, **options: Any) -> None:
    raise ValueError(
        "save_pretrained: expected experts in floating point, got quantised ones: save model.state_dict(), and load it "
        "into a model of the same config that is quantised the same way"
    )


def replace_weight(experts: Any, projection: str, weight: Any) -> None:
    """Put a quantised weight [E, rows, columns] in the place of a parameter."""
    delattr(experts, projection)
    setattr(experts, projection, QuantizedBuffers(weight))


def _holds_experts(module: Any) -> bool:
    weights = [getattr(module, name, None) for name in PROJECTIONS]
    described = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed"))
    return described and all(isinstance(w, torch.nn.Parameter) and w.dim() == 3 for w in weights)


def _require_version(version: str) -> None:
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST:
        raise ImportError(
            f"transformers: expected {OLDEST[0]}.{OLDEST[1]} or later, whose experts take other implementations, "
            f"got {version}: pip install --upgrade 'transformers>={OLDEST[0]}.{OLDEST[1]}'"
        )


def _has_norm(experts: Any) -> bool:
    """Whether a norm stands behind each expert's result."""
    return getattr(experts, "has_post_expert_norm", False)  # 5.7 knows no such norm


def fused_gate(experts: Any) -> tuple[str, bool] | None:
    """(activation, interleaved) of the `moe_mlp` that computes what `experts` do, or None: there is none, for their
    gate or for a norm behind each expert's result.

    Told from which function `_apply_gate` is and from the constants it would use, not from the name of the model.
    """
    if not experts.has_gate or "_apply_gate" in experts.__dict__ or _has_norm(experts):
        return None
    gate = _name(type(experts)._apply_gate)
    if gate in _CLAMPED_GATES:
        return _clamped(experts, *_CLAMPED_GATES[gate])
    if gate == _FP8_GATE:
        if getattr(experts, "gate_softcap", None) is not None:
            return None
        if getattr(experts, "swiglu_alpha", None) is not None:
            return _clamped(experts, False, "swiglu_alpha", "swiglu_limit")
        if getattr(experts, "swiglu_limit", None) is not None:
            return None
    elif gate != _DEFAULT_GATE:
        return None
    act_fn = experts.act_fn  # a module, or as in LFM2-MoE a function
    activation = _ACTIVATIONS.get(_name(act_fn if isinstance(act_fn, FunctionType) else type(act_fn)))
    return None if activation is None else (activation, False)


def require_gate(name: str, experts: Any) -> None:
    """ValueError, with the module's name, unless the kernels do all that `experts` do."""
    if fused_gate(experts) is None:
        raise ValueError(f"{name}: expected experts with a gate that expertile's kernels have, got another")


def _clamped(experts: Any, interleaved: bool, scale: str, limit: str) -> tuple[str, bool] | None:
    known = getattr(experts, scale) == GPT_OSS_SCALE and getattr(experts, limit) == GPT_OSS_LIMIT
    return ("gpt_oss", interleaved) if known else None


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"


# Asked of Python while a compiler traces: Dynamo takes a function's __module__ for a descriptor (torch 2.11 to 2.13).
_name._dynamo_marked_constant = True  # type: ignore[attr-defined]


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, lora: Lora | None = None
) -> Tensor:
    """The experts of a module that transformers' `use_experts_implementation` has decorated.

    Args:
        self: that module; the module's docstring says which attributes count.
        hidden_states: [T, H] bfloat16, float16 or float32.
        top_k_index: [T, k], the experts of each token; ids that are no expert's are dropped.
        top_k_weights: [T, k], floating point.
        lora: adapters of the weights, for a gate that the kernels have.

    Returns:
        [T, H] in hidden_states' dtype, in autocast's inside it. Differentiable; no host synchronisation.

    Raises:
        ValueError: tensors that do not fit together; the sentence is `moe_mlp`'s or `gathered_mm`'s.
    """
    gate = fused_gate(self)
    if gate is None:
        return _composed(self, hidden_states, top_k_index, top_k_weights)
    activation, interleaved = gate
    gate_up, down = self.gate_up_proj, self.down_proj
    if isinstance(gate_up, QuantizedBuffers):
        gate_up, down = gate_up.weight, down.weight
    elif self.is_transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    how: Any = {"activation": activation, "interleaved": interleaved, "lora": lora}
    if self.has_bias:
        how |= {"gate_up_bias": self.gate_up_proj_bias, "down_bias": self.down_proj_bias}
    return moe_mlp(hidden_states, gate_up, down, top_k_index, top_k_weights, **how)


def _composed(experts: Any, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    """The same with the module's own gate or activation, and norm, between the products."""
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    up, down = getattr(experts, name), experts.down_proj
    up_bias, down_bias = (getattr(experts, f"{n}_bias") if experts.has_bias else None for n in (name, "down_proj"))
    if not experts.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    if autocasts(x):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, up, down = x.to(dtype), up.to(dtype), down.to(dtype)
        up_bias, down_bias = (None if b is None else b.to(dtype) for b in (up_bias, down_bias))
    order = permutation(topk_ids, up.shape[0])
    own = torch.is_grad_enabled() and any(n not in _WEIGHTS for n, _ in experts.named_parameters())
    pre = gathered_mm(x, up, order.rows, order.offs, bias=up_bias)
    if own:
        pre = _known_rows(pre, order)
    act = experts._apply_gate(pre) if experts.has_gate else experts.act_fn(pre)
    y = grouped_mm(act.to(x.dtype), down, offs=order.offs, bias=down_bias)
    if _has_norm(experts):
        y = experts.post_expert_norm(_known_rows(y, order) if own else y).to(x.dtype)
    return combine(y, order.positions, topk_weights.float())


def _known_rows(rows: Tensor, order: Permutation) -> Tensor:
    """`rows` with zeros past the last expert's: what lies there is unspecified, and NaN times the gradient 0 would get
    into the gradient of a parameter that all rows share."""
    kept = torch.arange(rows.shape[0], device=rows.device) < order.offs[-1]
    return torch.where(kept[:, None], rows, 0)


def fp8_experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`experts_forward` for transformers' FP8Experts: e4m3 weights with one float32 scale for each block of 128×128.

    x and the activation are quantised in blocks of 1×128, as transformers' own implementations do. The backward pass
    runs in x's dtype; the weights have no gradients.

    Raises:
        ValueError: experts without a gate or with one that no kernel has, other blocks or scales, activation scales
            that were fixed beforehand, 4-bit weights.
    """
    if self.down_proj.element_size() > 1:  # left as they were by the quantiser
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)
    gate = fused_gate(self)
    refusal = _fp8_refusal(self, gate)
    if refusal is not None or gate is None:
        raise ValueError(
            f"experts_implementation='{NAME}': {refusal}; model.set_experts_implementation('grouped_mm') runs these"
        )
    activation, interleaved = gate
    gate_up, down = (
        Fp8Blocks(getattr(self, name).detach(), getattr(self, f"{name}_scale_inv").detach(), (128, 128))
        for name in PROJECTIONS
    )
    return moe_mlp(
        hidden_states, gate_up, down, top_k_index, top_k_weights, activation=activation, interleaved=interleaved
    )


def _fp8_refusal(experts: Any, gate: tuple[str, bool] | None) -> str | None:
    if gate is None:
        return "expected FP8 experts with a gate that expertile's kernels have, got another or none"
    if experts.gate_up_proj.dtype is not torch.float8_e4m3fn:
        return f"expected weights of float8_e4m3fn, got {experts.gate_up_proj.dtype}"
    if experts.block_size is None or tuple(experts.block_size) != (128, 128):
        return f"expected FP8 blocks of (128, 128), got {experts.block_size}"
    if experts.gate_up_proj_scale_inv.dtype is not torch.float32:
        return f"expected scales of float32, got {experts.gate_up_proj_scale_inv.dtype}"
    if experts.activation_scheme != "dynamic":
        return f"expected activations scaled as they come ('dynamic'), got {experts.activation_scheme!r}"
    return None
