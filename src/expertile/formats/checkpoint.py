"""The experts of whole checkpoints, whatever the format they are stored in, one weight after the other.

How a linear layer `name` is told apart, by the tensors that are there:

| tensors                                  | becomes                                              |
|------------------------------------------|------------------------------------------------------|
| qweight, scales, … (GPTQ, AWQ)           | Int4Weight                                           |
| weight_packed, weight_scale of bytes     | Mxfp4Weight (compressed-tensors, mxfp4-pack-quantized) |
| weight_packed, weight_scale, …           | Int4Weight (compressed-tensors)                      |
| weight (e4m3), weight_scale_inv          | Fp8Blocks of 128×128                                 |
| weight                                   | a tensor, or rounded to a format that is asked for   |

A checkpoint is what `formats.source` reads. Tensors stay on disk until their turn, and a layer is rounded an expert at
a time: peak memory beyond the results is that of one weight's stored tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from expertile.formats.fp8 import Fp8Blocks
from expertile.formats.int4.checkpoint import Names, alike, check_names, parts_of, read_linear_int4
from expertile.formats.int4.weight import Int4Weight
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.formats.quantized import changed
from expertile.formats.source import Source, reader
from expertile.formats.weight_only import WEIGHTS, quantize, rearranged

Get = Callable[[str], torch.Tensor | None]
_FP8_BLOCK = (128, 128)
_NAMES = {Fp8Blocks: "fp8"} | {weight: name for name, weight in WEIGHTS.items()}


def load(
    source: Source,
    weights: Mapping[str, Names],
    *,
    format: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    int4: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Pairs of a key of `weights` and the weight [E, N, K] of all its experts, read when the iterator comes to it.

    Args:
        source: tensors by name, a safetensors file, a list of them, or a folder.
        weights: by a key of your choice, for each expert the name of its linear layer, or of several whose rows are put
            under one another (gate_proj and up_proj), as `load_int4` takes them.
        format: "mxfp4", "mxfp4_fp8", "int4" or "fp8": what weights in floating point are rounded to; MXFP4 is put in
            the order of "mxfp4_fp8". None: as they are stored.
        dtype: of dense weights and of INT4's scales, bfloat16 or float16.
        device: where the results are to lie; tensors are moved there one by one.
        int4: how INT4 is stored, as `load_int4` has it as `format`: "gptq_v2" is for the caller to say.
        progress: called with the number of weights done and that of all.

    Raises:
        ValueError: a missing tensor, an activation order, experts in several formats, another format than the one asked
            for; with the layer's name.
        ImportError: a file is to be read and `safetensors` is not installed.
    """
    get = reader(source)
    if not isinstance(weights, Mapping):
        raise ValueError(f"weights: expected the names of layers by a key, got {type(weights).__name__}")
    for done, (key, names) in enumerate(weights.items(), 1):
        yield key, read_weight(get, names, format=format, dtype=dtype, device=device, int4=int4)
        if progress is not None:
            progress(done, len(weights))


def read_weight(
    get: Get,
    names: Names,
    *,
    format: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    int4: str | None = None,
) -> Any:
    """One weight [E, N, K] of all experts; arguments and errors as for `load`, `get` a tensor by its name."""
    check_names(names)
    experts = []
    for entry in names:
        parts = [read_linear(get, name, dtype=dtype, device=device, int4=int4) for name in parts_of(entry)]
        experts.append(in_format(_joined(parts, 1, entry), format, str(entry)))
    return _joined(experts, 0, names[0])


def in_format(weight: Any, format: str | None, name: str) -> Any:
    """A tensor rounded to `format`, if one is asked for; a weight that is quantised as it is, or in the order of
    `format`. ValueError, with its `name`, for one in another format."""
    if format is None:
        return weight
    if isinstance(weight, torch.Tensor):
        return quantize(weight, format)
    weight = rearranged(weight, format)
    stored = _NAMES[type(weight)]
    if stored != format:
        raise ValueError(f"{name}: expected weights in {format} or floating point, got {stored}")
    return weight


def read_linear(
    get: Get,
    name: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str | None = None,
    int4: str | None = None,
) -> Any:
    """The linear layer `name` as [1, N, K], in the format that it is stored in. ValueError, with its name."""
    scale = get(f"{name}.weight_scale")
    if scale is not None and scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        packed = get(f"{name}.weight_packed")
        tensors = {"weight_scale": scale.to(device)} | ({} if packed is None else {"weight_packed": packed.to(device)})
        try:
            return Mxfp4Weight.from_compressed_tensors(tensors)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    weight = get(f"{name}.weight")
    if weight is None:
        return read_linear_int4(get, name, int4, dtype, device, also="weight (floating point), ")
    if weight.dtype is not torch.float8_e4m3fn:
        return unscaled(weight, f"{name}.weight").to(device, dtype)[None]
    return changed(fp8_blocks(get, weight, f"{name}.weight", device), lambda x: x[None])


def unscaled(weight: torch.Tensor, name: str) -> torch.Tensor:
    """`weight`. ValueError, with its `name`, for values that need a scale: integers, or floating point in 8 bits."""
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        raise ValueError(f"{name}: expected floating point in 16 bits or more, or a format above, got {weight.dtype}")
    return weight


def fp8_blocks(get: Get, values: torch.Tensor, name: str, device: torch.device | str | None) -> Fp8Blocks:
    """`values` [..., N, K] in e4m3, stored as `name`, with the scales of their blocks. ValueError for other scales."""
    scales, (high, broad) = get(f"{name}_scale_inv"), _FP8_BLOCK
    *others, rows, columns = values.shape
    expected = (*others, -(-rows // high), -(-columns // broad))
    if scales is None or tuple(scales.shape) != expected:
        found = None if scales is None else list(scales.shape)
        raise ValueError(f"{name}_scale_inv: expected {list(expected)}, a scale for each 128×128, got {found}")
    return Fp8Blocks(values.to(device), scales.to(device, torch.float32), _FP8_BLOCK)


def _joined(weights: Sequence[Any], dim: int, name: object) -> Any:
    """Weights [1, N, K] put under one another (dim 1: their rows) or behind one another (dim 0: experts)."""
    first = weights[0]
    if any(type(w) is not type(first) for w in weights):
        raise ValueError(f"{name}: expected one format, got {', '.join(sorted({type(w).__name__ for w in weights}))}")
    if len(weights) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(weights), dim)
    if isinstance(first, Fp8Blocks):
        if dim == 1 and any(w.values.shape[1] % _FP8_BLOCK[0] for w in weights[:-1]):
            raise ValueError(f"{name}: expected multiples of {_FP8_BLOCK[0]} rows to put under one another")
        # As bytes: torch concatenates no float8 on every device.
        values = torch.cat([w.values.view(torch.uint8) for w in weights], dim).view(first.values.dtype)
        return Fp8Blocks(values, torch.cat([w.scales for w in weights], dim), _FP8_BLOCK)
    if isinstance(first, Int4Weight):
        weights = alike(weights)
    return type(first).cat_rows(weights) if dim else type(first).stack(weights)
