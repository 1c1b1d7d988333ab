"""Checkpoints of MoE models under transformers, the experts kept as they are stored or rounded as they are read.

    from expertile.integrations.checkpoints import load_model

    model = load_model("path/of/gpt-oss-120b", device="cuda")                      # MXFP4, as published
    model = load_model("path/of/Qwen3-30B-A3B", format="int4", device="cuda")      # bfloat16, rounded on the way
    model.generate(...)

Experts are found as stacked tensors (`gate_up_proj`, in e4m3 with `gate_up_proj_scale_inv`; or gpt-oss's
`gate_up_proj_blocks` and `_scales`), or one linear layer for each expert (gate_proj, up_proj and down_proj; w1, w3 and
w2) in a format that `formats.checkpoint` tells apart: MXFP4, INT4 of GPTQ, AWQ and compressed-tensors, FP8 with blocks
of 128×128, floating point. All else becomes `dtype`, or float32 where transformers keeps it so; layers beside the
experts that are quantised are dequantised. Peak memory beyond the model: the stored tensors of one weight.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from expertile.formats.checkpoint import Get, fp8_blocks, in_format, read_linear, read_weight, unscaled
from expertile.formats.fp8 import Fp8Blocks
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.formats.source import Source, reader
from expertile.integrations.transformers import (
    NAME,
    PROJECTIONS,
    refuse_to_save,
    register,
    replace_weight,
    require_gate,
)

# How checkpoints call the linear layers of one expert: those under one another in gate_up_proj, and down_proj.
_LINEAR = ((("gate_proj", "up_proj"), ("down_proj",)), (("w1", "w3"), ("w2",)))
_FIELDS = ("weight", "weight_packed", "qweight")
# What transformers calls otherwise than the checkpoints do.
_RENAMED = ((".mlp.", ".block_sparse_moe."), (".mlp.gate.", ".mlp."))


def load_model(
    path: str | Path,
    *,
    format: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """The model of a folder with config.json and safetensors files, on `device`, for inference.

    `format`: "mxfp4", "mxfp4_fp8", "int4" or "fp8" to round experts in floating point to, where "mxfp4_fp8" takes
    stored MXFP4 as well; None: as they are stored. `dtype` of all that is not packed, and of the activations: bfloat16
    or float16. `progress` is called with the number of layers done and that of all.

    Raises:
        ImportError: transformers is missing or too old.
        ValueError: a tensor is missing or of another shape or format, with its name.
    """
    register()
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(path)
    int4 = _int4_of(getattr(config, "quantization_config", None))
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # or transformers would quantise itself
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if (Path(path) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    get, buffers = reader(path), {name for name, own in model.state_dict().items() if not own.is_meta}
    load_experts(model, path, format=format, device=device, dtype=dtype, int4=int4, progress=progress)
    for name, own in model.state_dict(keep_vars=True).items():
        if own.is_meta or not isinstance(own, torch.nn.Parameter):
            found = _dense(get, name, _dtype(model, name, own), device, int4)
            if found is not None:
                _assign(model, name, found)
            elif name in buffers:  # a correction bias of zeros would choose other experts
                raise ValueError(f"{name}: expected a tensor of that name in {path}, got none")
    model.tie_weights()
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ValueError(f"{name}: expected a tensor of that name in {path}, got none")
    model.set_experts_implementation(NAME)
    return model.to(device).eval()


def load_experts(
    model: Any,
    source: Source,
    *,
    format: str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    int4: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Any:
    """Put the experts of `source` in the place of those of `model`, which may be on the meta device; returns it.

    `source`: tensors by name, safetensors files, or a folder of them. Packed values are rearranged, not rounded.
    `int4`: how INT4 is stored, as for `formats.checkpoint.load`. Other arguments as for `load_model`.

    Raises:
        ValueError: a tensor is missing or of another shape or format, with its name; a model without such experts, or
            quantised ones whose gate no kernel has.
    """
    get = reader(source)
    layers = [(n, m) for n, m in model.named_modules() if all(hasattr(m, a) for a in (*PROJECTIONS, "is_transposed"))]
    if not layers:
        raise ValueError("model: expected experts with gate_up_proj and down_proj, got none")
    for done, (name, experts) in enumerate(layers, 1):
        for projection in PROJECTIONS:
            weight = _stored(get, name, projection, experts, format, dtype, device, int4)
            parameter, full = getattr(experts, projection), f"{name}.{projection}"
            expected = tuple(parameter.mT.shape if experts.is_transposed else parameter.shape)
            shape = tuple(weight.values.shape if isinstance(weight, Fp8Blocks) else weight.shape)
            if shape != expected:
                raise ValueError(f"{full}: expected {list(expected)} values, got {list(shape)}")
            if isinstance(weight, torch.Tensor):
                _assign(model, full, weight.mT.contiguous() if experts.is_transposed else weight)
            else:
                require_gate(name, experts)
                replace_weight(experts, projection, weight)
                refuse_to_save(model)
        if progress is not None:
            progress(done, len(layers))
    return model


def _stored(
    get: Get,
    name: str,
    projection: str,
    experts: Any,
    format: str | None,
    dtype: torch.dtype,
    device: torch.device | str | None,
    int4: str | None,
) -> Any:
    """A projection of all experts, [E, N, K], as it is stored, or in `format`."""
    which = PROJECTIONS.index(projection)
    for stem in _called(name):
        full = f"{stem}.{projection}"
        blocks = get(f"{full}_blocks")
        if blocks is not None:
            scales = get(f"{full}_scales")
            if scales is None:
                raise ValueError(f"{full}_scales: expected a tensor of that name, got none")
            try:
                weight = Mxfp4Weight.from_blocks(blocks.to(device), scales.to(device))
            except ValueError as error:
                raise ValueError(f"{full}: {error}") from None
            return in_format(weight, format, full)
        stacked = get(full)
        if stacked is not None and stacked.dtype is torch.float8_e4m3fn:
            held = fp8_blocks(get, stacked, full, device)
            return in_format(held.transposed() if experts.is_transposed else held, format, full)
        if stacked is not None:
            stacked = unscaled(stacked.mT if experts.is_transposed else stacked, full)
            return in_format(stacked.to(device, dtype), format, full)
        for parts in (linear[which] for linear in _LINEAR):
            if any(get(f"{stem}.0.{parts[0]}.{field}") is not None for field in _FIELDS):
                count = getattr(experts, projection).shape[0]
                names = [[f"{stem}.{e}.{part}" for part in parts] for e in range(count)]
                return read_weight(get, names, format=format, dtype=dtype, device=device, int4=int4)
    raise ValueError(f"{name}.{projection}: expected tensors of the experts, stacked or one by one, got none")


def _int4_of(quantization: Any) -> str | None:
    """The format of INT4 that a config's quantization_config names, where the tensors do not tell it."""
    found = quantization if isinstance(quantization, dict) else getattr(quantization, "__dict__", {})
    return "gptq_v2" if found.get("checkpoint_format") == "gptq_v2" else None


def _dense(
    get: Get, name: str, dtype: torch.dtype, device: torch.device | str | None, int4: str | None
) -> torch.Tensor | None:
    """A parameter that is no expert's, dequantised where it is quantised; None: there is none of that name."""
    for full in _called(name):
        found = get(full)
        if found is not None and found.dtype is not torch.float8_e4m3fn:
            return (unscaled(found, full) if dtype.is_floating_point else found).to(device, dtype)
        stem, _, last = full.rpartition(".")
        if last == "weight" and any(get(f"{stem}.{field}") is not None for field in _FIELDS):
            weight = read_linear(get, stem, dtype=dtype, device=device, int4=int4)
            return weight.dequantize(dtype)[0]  # type: ignore[no-any-return]
    return None


def _dtype(model: Any, name: str, own: torch.Tensor) -> torch.dtype:
    """What transformers makes of a tensor of that name: its dtype in the model, or float32 where the model asks so."""
    kept = set(model._keep_in_fp32_modules_strict or ())
    if own.dtype is torch.float16:
        kept |= set(model._keep_in_fp32_modules or ())
    patterns = (re.escape(key).replace(r"\*", ".*") for key in kept)
    return torch.float32 if any(re.search(pattern, name) for pattern in patterns) else own.dtype


def _called(name: str) -> tuple[str, ...]:
    """The names that a checkpoint may have for what the model calls `name`."""
    return (name, *(name.replace(here, there) for here, there in _RENAMED if here in name))


def _assign(model: Any, name: str, value: torch.Tensor) -> None:
    """Put `value` in the place of a parameter or buffer."""
    owner, _, last = name.rpartition(".")
    module = model.get_submodule(owner)
    old = getattr(module, last)
    if old.shape != value.shape:
        raise ValueError(f"{name}: expected shape {list(old.shape)}, got {list(value.shape)}")
    if isinstance(old, torch.nn.Parameter):
        value = torch.nn.Parameter(value, requires_grad=old.requires_grad)
    setattr(module, last, value)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters of modules made within are on the meta device; buffers, of which checkpoints lack some, are not."""
    original = torch.nn.Module.register_parameter

    def register_parameter(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        meta = None if param is None else torch.nn.Parameter(param.detach().to("meta"), param.requires_grad)
        original(self, name, meta)

    torch.nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = original  # type: ignore[method-assign]
