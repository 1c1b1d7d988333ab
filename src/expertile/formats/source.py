"""Where the tensors of a checkpoint come from: a mapping, safetensors files, or a folder of them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

Source = Mapping[str, torch.Tensor] | str | Path | Sequence[str | Path]


def reader(source: Source) -> Callable[[str], torch.Tensor | None]:
    """A function from a tensor's name to the tensor, or None where there is none; files stay open, tensors on disk."""
    if isinstance(source, Mapping):
        return source.get
    if not isinstance(source, (str, Path, Sequence)):
        raise ValueError(
            "source: expected tensors by name, a safetensors file, a list of them, or a folder, got "
            f"{type(source).__name__}"
        )
    from safetensors import SafetensorError, safe_open

    paths = files(Path(source)) if isinstance(source, (str, Path)) else [Path(p) for p in source]
    place: dict[str, Any] = {}
    for path in paths:
        try:
            opened = safe_open(str(path), framework="pt")
        except SafetensorError as error:
            raise ValueError(f"source: expected a safetensors file, got {path}: {error}") from None
        place.update(dict.fromkeys(opened.keys(), opened))

    def get(name: str) -> torch.Tensor | None:
        return place[name].get_tensor(name) if name in place else None

    return get


def files(path: Path) -> Iterable[Path]:
    """The safetensors files of a folder, by its index or by their names; a file itself."""
    if not path.is_dir():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.exists():
        try:
            return [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"source: expected an object with a weight_map in {index}, got something else") from None
    found = sorted(path.glob("*.safetensors"))
    if not found:
        raise ValueError(f"source: expected a folder with safetensors files, got {path} without any")
    return found
