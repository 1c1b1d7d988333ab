"""The experts of a layer from a checkpoint, and into one: `load_int4` and `save_int4`.

A checkpoint is a mapping from names to tensors, a safetensors file, several, or a folder of them (as Hugging Face
models come, with model.safetensors.index.json or without). Reading and writing files needs the `safetensors` package.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from expertile.formats.int4.compressed_tensors import FIELDS as COMPRESSED_FIELDS
from expertile.formats.int4.compressed_tensors import from_compressed_tensors, to_compressed_tensors
from expertile.formats.int4.qweight import AWQ_FIELDS, GPTQ_FIELDS, from_awq, from_gptq, to_awq, to_gptq
from expertile.formats.int4.weight import Int4Weight
from expertile.formats.source import Source, reader


@dataclass(frozen=True)
class Format:
    """How one tool stores a layer: the names of its tensors, and the way to and from an `Int4Weight`."""

    fields: tuple[str, ...]
    read: Callable[..., Int4Weight]
    write: Callable[..., dict[str, torch.Tensor]]
    options: tuple[tuple[str, Any], ...] = ()


FORMATS: dict[str, Format] = {
    "gptq": Format(GPTQ_FIELDS, from_gptq, to_gptq, (("version", 1),)),
    "gptq_v2": Format(GPTQ_FIELDS, from_gptq, to_gptq, (("version", 2),)),
    "awq": Format(AWQ_FIELDS, from_awq, to_awq),
    "compressed-tensors": Format(COMPRESSED_FIELDS, from_compressed_tensors, to_compressed_tensors),
}

Names = Sequence[str | Sequence[str]]


def load_int4(
    source: Source,
    names: Names,
    *,
    format: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Int4Weight:
    """The weights of all experts of a layer, [G, N, K].

    Args:
        source: tensors by name, a safetensors file, a list of them, or a folder.
        names: for each expert the name of its linear layer ("model.layers.0.mlp.experts.7.down_proj"), or several whose
            rows are put under one another (gate_proj and up_proj).
        format: "gptq", "gptq_v2", "awq" or "compressed-tensors". None: told by the tensors' names and shapes; GPTQ is
            then taken to be of version 1, which the tensors do not tell.
        dtype: of the scales, bfloat16 or float16: that of the activations to come. None: as stored.
        device: where the result is to lie; layers are read there one by one.

    Raises:
        ValueError: a missing tensor, a format that does not fit, an activation order; with the layer's name.
        ImportError: a file is to be read and `safetensors` is not installed.
    """
    get = reader(source)
    check_names(names)
    experts = [
        Int4Weight.cat_rows([read_linear_int4(get, name, format, dtype, device) for name in parts_of(entry)])
        for entry in names
    ]
    return Int4Weight.stack(alike(experts))


def int4_tensors(weight: Int4Weight, names: Names, format: str) -> dict[str, torch.Tensor]:
    """The tensors that a tool of that format would have written, by name. An expert with several names is cut into as
    many equal parts of its rows."""
    writer = _format(format)
    check_names(names)
    if not isinstance(weight, Int4Weight):
        raise ValueError(f"weight: expected an Int4Weight, got {type(weight).__name__}")
    g, n, _ = weight.shape
    if len(names) != g:
        raise ValueError(f"names: expected {g}, one for each expert, got {len(names)}")
    tensors = {}
    for expert, entry in enumerate(names):
        parts = parts_of(entry)
        if n % len(parts):
            raise ValueError(f"names: expected a number of parts that divides N = {n}, got {len(parts)}")
        rows = n // len(parts)
        for i, name in enumerate(parts):
            part = _rows(weight, expert, slice(i * rows, (i + 1) * rows))
            for field, tensor in writer.write(part, 0, **dict(writer.options)).items():
                tensors[f"{name}.{field}"] = tensor
    return tensors


def save_int4(path: str | Path, weight: Int4Weight, names: Names, format: str) -> None:
    """Write `int4_tensors` into one safetensors file."""
    from safetensors.torch import save_file

    save_file(int4_tensors(weight, names, format), str(path))


def _rows(weight: Int4Weight, expert: int, rows: slice) -> Int4Weight:
    zeros = None if weight.zeros is None else weight.zeros[expert : expert + 1, :, rows].contiguous()
    scales = weight.scales[expert : expert + 1, :, rows].contiguous()
    return Int4Weight(weight.packed[expert : expert + 1, rows].contiguous(), scales, zeros, weight.group_size)


def check_names(names: object) -> None:
    """ValueError unless there is an entry for each of one expert or more."""
    if isinstance(names, str) or not isinstance(names, Sequence) or not names:
        raise ValueError(f"names: expected a list with the linear layers of each expert, got {names!r}")


def parts_of(entry: str | Sequence[str]) -> list[str]:
    """The linear layers of an expert's weight."""
    return [entry] if isinstance(entry, str) else list(entry)


def alike(weights: Sequence[Int4Weight]) -> Sequence[Int4Weight]:
    """Symmetric weights beside asymmetric ones get zero points of 8 written out."""
    return weights if all(w.zeros is None for w in weights) else [w.with_zeros() for w in weights]


def read_linear_int4(
    get: Callable[[str], torch.Tensor | None],
    name: str,
    format: str | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    also: str = "",
) -> Int4Weight:
    """The linear layer `name`, [1, N, K]; arguments and errors as for `load_int4`, `get` a tensor by its name. `also`:
    what else the caller would have read, for the error where nothing is there."""
    kinds = [FORMATS[format]] if format in FORMATS else FORMATS.values()
    stored = {field: get(f"{name}.{field}") for kind in kinds for field in kind.fields}
    tensors = {field: found.to(device) for field, found in stored.items() if found is not None}
    try:
        reader = _format(format or _detect(tensors, also))
        return reader.read(tensors, dtype=dtype, **dict(reader.options))
    except ValueError as e:
        raise ValueError(f"{name}: {e}") from None


def _detect(tensors: Mapping[str, torch.Tensor], also: str) -> str:
    """The format by the fields that are there; AWQ's qweight has an eighth of the columns that its scales have."""
    if "weight_packed" in tensors:
        return "compressed-tensors"
    if "qweight" in tensors and "scales" in tensors:
        return "gptq" if tensors["qweight"].shape[-1] == tensors["scales"].shape[-1] else "awq"
    raise ValueError(
        f"expected {also}weight_packed (compressed-tensors), or qweight and scales (GPTQ, AWQ), got "
        + (", ".join(sorted(tensors)) or "no tensor of that name")
    )


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {name!r}")
    return FORMATS[name]
