"""gpt-oss's own checkpoints under transformers, the experts kept in MXFP4 as they are stored.

    from expertile.integrations.gpt_oss import load_gpt_oss

    model = load_gpt_oss("path/of/gpt-oss-120b", device="cuda")
    model.generate(...)

A checkpoint has, for each layer's experts, `gate_up_proj_blocks` [E, 2I, H/32, 16] and `gate_up_proj_scales`
[E, 2I, H/32] of bytes, the same of `down_proj`, and biases; all else is bfloat16. Peak memory beyond the model: the
tensors of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.formats.source import Source, reader
from expertile.integrations.transformers import NAME, register, replace_weight

_PROJECTIONS = ("gate_up_proj", "down_proj")


def load_gpt_oss(
    path: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """The model of a folder with config.json and safetensors files, on `device`, its experts as `Mxfp4Weight`.

    `dtype` of all that is not packed, and of the activations: bfloat16 or float16. `progress` is called with the number
    of layers done and that of all.

    Raises:
        ImportError: transformers is missing or too old.
        ValueError: a tensor is missing or of another shape, with its name.
    """
    register()
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # or transformers would quantise itself
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    get = reader(path)
    load_gpt_oss_experts(model, path, device=device, progress=progress)
    for name, parameter in list(model.named_parameters()):
        if parameter.is_meta:
            found = get(name)
            if found is None:
                if name in (getattr(model, "_tied_weights_keys", None) or ()):
                    continue  # tie_weights finds it
                raise ValueError(f"{name}: expected a tensor of that name in {path}, got none")
            _assign(model, name, found.to(device, dtype))
    model.tie_weights()
    model.set_experts_implementation(NAME)
    return model.to(device).eval()


def load_gpt_oss_experts(
    model: Any,
    source: Source,
    *,
    device: torch.device | str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Put the MXFP4 experts of `source` in the place of those of `model`, which may be on the meta device; returns it.

    `source`: tensors by name, safetensors files, or a folder of them. The values are rearranged, not rounded.

    Raises:
        ValueError: a tensor is missing or of another shape, with its name; or a model without such experts.
    """
    get = reader(source)
    layers = [(n, m) for n, m in model.named_modules() if all(hasattr(m, p) for p in _PROJECTIONS)]
    if not layers:
        raise ValueError("model: expected experts with gate_up_proj and down_proj, got none")
    for done, (name, experts) in enumerate(layers, 1):
        for projection in _PROJECTIONS:
            tensors = []
            for kind in ("blocks", "scales"):
                full = f"{name}.{projection}_{kind}"
                found = get(full)
                if found is None:
                    raise ValueError(f"{full}: expected a tensor of that name, got none")
                tensors.append(found.to(device))
            parameter = getattr(experts, projection)
            shape = tuple(parameter.mT.shape if experts.is_transposed else parameter.shape)
            try:
                weight = Mxfp4Weight.from_blocks(*tensors)
            except ValueError as error:
                raise ValueError(f"{name}.{projection}: {error}") from None
            if weight.shape != shape:
                raise ValueError(f"{name}.{projection}: expected {list(shape)} values, got {list(weight.shape)}")
            replace_weight(experts, projection, weight)
        if progress is not None:
            progress(done, len(layers))
    return model


def _assign(model: Any, name: str, value: torch.Tensor) -> None:
    owner, _, last = name.rpartition(".")
    old = model.get_parameter(name)
    if old.shape != value.shape:
        raise ValueError(f"{name}: expected shape {list(old.shape)}, got {list(value.shape)}")
    setattr(model.get_submodule(owner), last, torch.nn.Parameter(value, requires_grad=old.requires_grad))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Parameters of modules made within are on the meta device; buffers, which no checkpoint has, are not."""
    original = torch.nn.Module.register_parameter

    def register_parameter(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        meta = None if param is None else torch.nn.Parameter(param.detach().to("meta"), param.requires_grad)
        original(self, name, meta)

    torch.nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = original  # type: ignore[method-assign]
