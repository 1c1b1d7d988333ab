"""flashinfer-bench's definitions and workloads, read from a folder, and the inputs that a workload describes.

    FOLDER/definitions/**/*.json     one definition each: axes, inputs, outputs, and `run` in Python, the reference
    FOLDER/workloads/**/*.jsonl      a line for each workload: values of the variable axes, and where inputs come from

A reference is foreign code. It is compiled and executed in this process when its definition is raced, never before.
"""

import ast
import json
import re
import zlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_NAMES = "float32 float16 bfloat16 float8_e4m3fn float8_e5m2 int64 int32 int16 int8 bool"
DTYPES = {name: getattr(torch, name) for name in _NAMES.split()}
_RANGES = {torch.int8: 128, torch.bool: 2}  # of other integers 1024, as flashinfer-bench draws them


@dataclass(frozen=True)
class Definition:
    """What is computed. `axes` has the constants' values, and None for a variable axis; `data` is the whole object."""

    name: str
    op_type: str
    axes: Mapping[str, int | None] = field(hash=False)
    data: Mapping[str, Any] = field(hash=False, repr=False)

    @property
    def inputs(self) -> Mapping[str, Mapping[str, Any]]:
        return self.data["inputs"]

    @property
    def outputs(self) -> Mapping[str, Mapping[str, Any]]:
        return self.data["outputs"]

    @property
    def tensors(self) -> tuple[str, ...]:
        """The inputs that are no scalars."""
        return tuple(name for name, spec in self.inputs.items() if spec["shape"] is not None)

    def reference(self) -> Callable[..., Any]:
        """The function `run` of the reference. This executes foreign code."""
        space: dict[str, Any] = {"__name__": f"reference of {self.name}"}
        exec(compile(self.data["reference"], f"<reference of {self.name}>", "exec"), space)
        return space["run"]


@dataclass(frozen=True)
class Task:
    """One workload of a definition: `axes` are the values of its variable axes, `data` is its object."""

    definition: Definition
    uuid: str
    axes: Mapping[str, int] = field(hash=False)
    root: Path
    data: Mapping[str, Any] = field(hash=False, repr=False)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an input or output, () for a scalar. ValueError for an axis without a value."""
        known = {axis: n for axis, n in {**self.definition.axes, **self.axes}.items() if n is not None}
        axes = self._spec(name)["shape"] or ()
        if unknown := [axis for axis in axes if axis not in known]:
            raise ValueError(f"{self.definition.name}: {name}: expected axes with a value, got {unknown[0]!r}")
        return tuple(known[axis] for axis in axes)

    def dtype(self, name: str) -> torch.dtype:
        """Of an input or output. ValueError for one that torch has not."""
        text = self._spec(name)["dtype"]
        if text not in DTYPES:
            raise ValueError(f"{self.definition.name}: {name}: expected one of {', '.join(DTYPES)}, got {text!r}")
        return DTYPES[text]

    def nbytes(self, name: str | None = None) -> int:
        """Of an input or output; without a name of all tensors."""
        if name is None:
            return sum(map(self.nbytes, (*self.definition.tensors, *self.definition.outputs)))
        return torch.Size(self.shape(name)).numel() * self.dtype(name).itemsize

    def is_random(self, name: str) -> bool:
        """Whether an input is drawn, which is so of one that the workload does not name."""
        return self._source(name)["type"] == "random"

    def make(self, names: Collection[str], device: torch.device, seed: int) -> dict[str, Any]:
        """The inputs `names` in the order of the definition, random ones drawn as flashinfer-bench draws them."""
        return {name: self._made(name, device, seed) for name in self.definition.inputs if name in names}

    def _spec(self, name: str) -> Mapping[str, Any]:
        return {**self.definition.inputs, **self.definition.outputs}[name]

    def _source(self, name: str) -> Mapping[str, Any]:
        return self.data["inputs"].get(name, {"type": "random"})

    def _made(self, name: str, device: torch.device, seed: int) -> Tensor | int | float | bool:
        source, shape, dtype = self._source(name), self.shape(name), self.dtype(name)
        if source["type"] == "scalar":
            return source["value"]
        if source["type"] == "safetensors":
            return _loaded(self.root / source["path"], source["tensor_key"], shape, dtype).to(device)
        if not self.is_random(name):
            raise ValueError(f"{self.uuid}: {name}: expected random, safetensors or scalar, got {source['type']!r}")
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()) * 2**31 + seed)
        made = _random(shape, dtype, device, generator)
        return made if name in self.definition.tensors else made.item()


def _random(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    """Normal, within ±2 where it is FP8; integers of a fixed range."""
    if dtype.is_floating_point:
        wide = dtype if dtype.itemsize > 1 else torch.float32
        x = torch.randn(shape, dtype=wide, device=device, generator=generator)
        return x if dtype.itemsize > 1 else x.clamp_(-2.0, 2.0).to(dtype)
    most = _RANGES.get(dtype, 1024)
    low = 0 if dtype is torch.bool else -most
    return torch.randint(low, most, shape, dtype=dtype, device=device, generator=generator)


def _loaded(path: Path, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            x = file.get_tensor(key)
    except SafetensorError as error:
        raise ValueError(f"{path}: expected a safetensors file with {key!r} (no pointer of Git LFS): {error}") from None
    if tuple(x.shape) != shape or x.dtype is not dtype:
        raise ValueError(f"{path}: {key}: expected {list(shape)} {dtype}, got {list(x.shape)} {x.dtype}")
    return x


def load(root: Path) -> tuple[dict[str, Definition], dict[str, list[Task]]]:
    """The definitions of a folder, and of each its workloads. Executes nothing. ValueError names the file and what is
    wrong with it; FileNotFoundError if there are no definitions."""
    files = sorted((root / "definitions").rglob("*.json"))
    if not files:
        raise FileNotFoundError(f"definition: expected {root / 'definitions'} with JSON files, found none")
    definitions: dict[str, Definition] = {}
    for path in files:
        found = _definition(path)
        if found.name in definitions:
            raise ValueError(f"{path}: name: expected each once, got {found.name!r} twice")
        definitions[found.name] = found
    tasks: dict[str, list[Task]] = {name: [] for name in definitions}
    for path in sorted((root / "workloads").rglob("*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if line.strip():
                task = _task(f"{path}:{number}", line, definitions, root)
                tasks[task.definition.name].append(task)
    return definitions, tasks


def _definition(path: Path) -> Definition:
    data = _object(str(path), path.read_text(encoding="utf-8"))
    texts, objects = ("name", "op_type", "reference"), ("axes", "inputs", "outputs")
    for key in (*texts, *objects):
        if not isinstance(data.get(key), str if key in texts else dict) or not data[key]:
            kind = "a text" if key in texts else "an object"
            raise ValueError(f"{path}: {key}: expected {kind} that is not empty, got {data.get(key)!r}")
    for key, needed in (("axes", {"type"}), ("inputs", {"shape", "dtype"}), ("outputs", {"shape", "dtype"})):
        for name, spec in data[key].items():
            if not isinstance(spec, dict) or not needed <= spec.keys():
                raise ValueError(
                    f"{path}: {key}.{name}: expected an object with {', '.join(sorted(needed))}, got {spec!r}"
                )
    for key in ("name", "op_type"):  # folders and files are called after them
        if not re.fullmatch(r"\w[\w.+-]*", data[key]):
            raise ValueError(f"{path}: {key}: expected letters, digits and ._+-, got {data[key]!r}")
    try:
        body = ast.parse(data["reference"]).body
    except SyntaxError as error:
        raise ValueError(f"{path}: reference: expected Python, got {error}") from None
    if not any(isinstance(node, ast.FunctionDef) and node.name == "run" for node in body):
        raise ValueError(f"{path}: reference: expected a function run, got none")
    axes = {name: axis.get("value") for name, axis in data["axes"].items()}
    return Definition(data["name"], data["op_type"], axes, data)


def _task(where: str, line: str, definitions: Mapping[str, Definition], root: Path) -> Task:
    data = _object(where, line)
    name, work = data.get("definition"), data.get("workload")
    if not isinstance(name, str) or name not in definitions:
        raise ValueError(f"{where}: definition: expected one of the folder's, got {name!r}")
    if not isinstance(work, dict) or not all(key in work for key in ("uuid", "axes", "inputs")):
        raise ValueError(f"{where}: workload: expected an object with uuid, axes and inputs, got {work!r}")
    return Task(definitions[name], work["uuid"], work["axes"], root, work)


def _object(where: str, text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: expected a JSON object: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(data).__name__}")
    return data
