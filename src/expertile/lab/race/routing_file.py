"""Routing files: real rows per expert, or real top-k choices, layer by layer.

JSON, one object:

    {"num_experts": 8,
     "layers": [{"name": "model.layers.0", "counts": [1842, 2341, 1756, 2103, 1987, 2254, 1881, 2220]},
                {"name": "model.layers.1", "topk_ids": [[3, 5], [0, 3], [7, 1]]}]}

`counts` holds the rows of each expert; `topk_ids` the experts chosen by each token, distinct within a token. A layer
has one of the two. `name` may be left out (it becomes the layer's index).

`.npz`, for many tokens: a scalar `num_experts`, and for each layer one integer array named `counts/<layer>` [E] or
`topk_ids/<layer>` [T, k].
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard
from zipfile import BadZipFile, is_zipfile

import numpy as np

from expertile.lab.measure.env import known_keys

SUFFIXES = (".json", ".npz")


@dataclass(frozen=True)
class RoutingFile:
    """What a routing file holds: rows of each expert, by the name of the layer."""

    num_experts: int
    counts: Mapping[str, tuple[int, ...]]


def read_routing_file(path: str | Path) -> RoutingFile:
    """Read and validate a routing file. ValueError names the file, the field, what was expected and what came;
    FileNotFoundError."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(f"{path}: expected a routing file ending in {' or '.join(SUFFIXES)}, got {path.suffix!r}")
    if not path.is_file():
        raise FileNotFoundError(f"routing file {path} does not exist")
    data = _read_json(path) if path.suffix == ".json" else _read_npz(path)
    return _validate(str(path), data)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected JSON, got something else: {error}") from None


def _read_npz(path: Path) -> dict[str, Any]:
    """The same structure as the JSON object, from arrays."""
    data: dict[str, Any] = {"layers": []}
    if not is_zipfile(path):
        raise ValueError(f"{path}: expected an archive of arrays (numpy.savez), got another file")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            for key in arrays.files:
                array, (kind, _, layer) = _array(arrays, key), key.partition("/")
                if array is None or array.dtype.kind not in "iu":
                    got = "objects" if array is None else f"dtype {array.dtype}"
                    raise ValueError(f"{key}: expected integers, got {got}")
                if key == "num_experts":
                    data["num_experts"] = array.tolist()
                elif kind in ("counts", "topk_ids") and layer:
                    data["layers"].append({"name": layer, kind: array.tolist()})
                else:
                    raise ValueError(f"{key}: unknown array; expected num_experts, counts/<layer> or topk_ids/<layer>")
    except (OSError, ValueError, BadZipFile) as error:
        raise ValueError(f"{path}: {error}") from None
    return data


def _array(arrays: Any, key: str) -> Any:
    """An array of the archive, or None where it is none that can be read without running code."""
    try:
        return arrays[key]
    except ValueError:
        return None


def _validate(path: str, data: Any) -> RoutingFile:
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected an object with num_experts and layers, got {_what(data)}")
    known_keys(f"{path}: ", data, ("num_experts", "layers"))
    num_experts = data.get("num_experts")
    if not _is_int(num_experts) or num_experts < 1:
        raise ValueError(f"{path}: num_experts: expected an integer of 1 or more, got {_what(num_experts)}")
    layers = data.get("layers")
    if not isinstance(layers, list) or not layers:
        raise ValueError(f"{path}: layers: expected a list with at least one layer, got {_what(layers)}")
    found: dict[str, tuple[int, ...]] = {}
    for i, layer in enumerate(layers):
        name, counts = _layer(f"{path}: layers[{i}]", i, layer, num_experts)
        if name in found:
            raise ValueError(f"{path}: layers[{i}].name: expected a name of its own, got {name!r} a second time")
        found[name] = counts
    return RoutingFile(num_experts, found)


def _layer(where: str, index: int, layer: Any, num_experts: int) -> tuple[str, tuple[int, ...]]:
    if not isinstance(layer, dict):
        raise ValueError(f"{where}: expected an object with counts or topk_ids, got {_what(layer)}")
    known_keys(f"{where}.", layer, ("name", "counts", "topk_ids"))
    name = layer.get("name", str(index))
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}.name: expected a non-empty string, got {_what(name)}")
    if ("counts" in layer) == ("topk_ids" in layer):
        raise ValueError(f"{where}: expected counts or topk_ids, got {'both' if 'counts' in layer else 'neither'}")
    if "counts" in layer:
        return name, _counts(f"{where}.counts", layer["counts"], num_experts)
    _check_ids(f"{where}.topk_ids", layer["topk_ids"], num_experts)
    return name, tuple(np.bincount(np.ravel(layer["topk_ids"]), minlength=num_experts).tolist())


def _counts(where: str, counts: Any, num_experts: int) -> tuple[int, ...]:
    if not isinstance(counts, list) or len(counts) != num_experts:
        raise ValueError(f"{where}: expected a list of {num_experts} (num_experts) integers, got {_what(counts)}")
    for i, count in enumerate(counts):
        if not _is_int(count) or count < 0:
            raise ValueError(f"{where}[{i}]: expected an integer of 0 or more, got {_what(count)}")
    return tuple(counts)


def _check_ids(where: str, ids: Any, num_experts: int) -> None:
    if not isinstance(ids, list) or not ids:
        raise ValueError(f"{where}: expected a list with one row per token, got {_what(ids)}")
    top_k = len(ids[0]) if isinstance(ids[0], list) else 0
    for t, row in enumerate(ids):
        if not isinstance(row, list) or not row:
            raise ValueError(f"{where}[{t}]: expected a list of expert ids, got {_what(row)}")
        if len(row) != top_k:
            raise ValueError(f"{where}[{t}]: expected {top_k} ids as the first token has, got {len(row)}")
        for j, expert in enumerate(row):
            if not _is_int(expert) or not 0 <= expert < num_experts:
                raise ValueError(f"{where}[{t}][{j}]: expected an id from 0 to {num_experts - 1}, got {_what(expert)}")
        if len(set(row)) != top_k:
            raise ValueError(f"{where}[{t}]: expected distinct ids, got {row}")


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _what(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    return repr(value)
