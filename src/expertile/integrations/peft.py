"""Hugging Face PEFT: adapters of experts (LoRA by `target_parameters`) on expertile's kernels.

    from expertile.integrations.peft import use_adapters

    model = get_peft_model(model, LoraConfig(r=16, target_parameters=["gate_up_proj", "down_proj"], …))
    quantize_experts(model, "mxfp4")      if the experts below are to be in four bits: after get_peft_model
    use_adapters(model)

PEFT adds each adapter's product B A to the whole weight, every time the layer runs. Here the rows of tokens pass the
two factors (`expertile.moe.lora`), and the weight below may be quantised. Adapters stay PEFT's: their parameters,
names, `save_pretrained` and `set_adapter`.
"""

from functools import cache
from typing import Any

import torch

from expertile.formats.fp8 import QuantizedBuffers
from expertile.integrations.transformers import experts_forward, fused_gate, register
from expertile.moe.lora import Adapter, Lora

_WEIGHTS = {"gate_up_proj": "gate_up", "down_proj": "down"}


def use_adapters(model: Any) -> Any:
    """Run the experts of `model`, made by `get_peft_model` with `target_parameters`, on expertile; returns the model.

    A call with one active adapter that is not merged runs here, with any other PEFT's own way does. Experts then are
    frozen: their weights must not require gradients, as PEFT leaves them.

    Raises:
        ImportError: PEFT or transformers is missing or too old.
        ValueError: no adapter of experts whose gate the kernels have.
    """
    register()
    wrapper, faster = _classes()
    found = 0
    for module in model.modules():
        if type(module) is wrapper and _is_ours(module):
            module.__class__ = faster
        found += type(module) is faster
    if not found:
        raise ValueError("model: expected adapters of the gate_up_proj or down_proj of experts, got none")
    return model


@cache
def _classes() -> tuple[type, type]:
    """PEFT's wrapper of a parameter, and the class that takes its place."""
    try:
        from peft.tuners.lora.layer import ParamWrapper
    except ImportError as error:
        raise ImportError("peft has no target_parameters: pip install 'peft>=0.17'") from error

    class ExpertsWrapper(ParamWrapper):  # type: ignore[misc]
        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            lora = None if "adapter_names" in kwargs else _lora_of(self)
            if lora is not None:
                return experts_forward(self.get_base_layer(), x, *args, **kwargs, lora=lora)
            quantised = isinstance(getattr(self.get_base_layer(), self.parameter_name), QuantizedBuffers)
            if quantised and not self.disable_adapters:
                raise ValueError("adapters of quantised experts: expected one active adapter, not merged, got others")
            return super().forward(x, *args, **kwargs)  # type: ignore[no-any-return]

    return ParamWrapper, ExpertsWrapper


def _is_ours(wrapper: Any) -> bool:
    experts = wrapper.get_base_layer()
    described = all(hasattr(experts, n) for n in ("has_gate", "has_bias", "is_transposed", *_WEIGHTS))
    return described and fused_gate(experts) is not None


def _lora_of(wrapper: Any) -> Lora | None:
    """The adapters of a wrapper and of those within it; None where they are not one adapter that is not merged."""
    found: dict[str, Adapter] = {}
    while hasattr(wrapper, "base_layer"):
        active = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
        if wrapper.disable_adapters or wrapper.merged or len(active) > 1 or wrapper.parameter_name not in _WEIGHTS:
            return None
        for name in active:
            a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
            found[_WEIGHTS[wrapper.parameter_name]] = Adapter(a, b, wrapper.scaling[name])
        wrapper = wrapper.base_layer
    return Lora(**found) if found else None
