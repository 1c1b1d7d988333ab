"""BenchSpec: what `expertile bench` runs, from the command line or from a TOML file; docs/guide/race.md shows one with
every key. Paths of candidates and routing files are relative to the TOML file."""

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from expertile.lab.bench.presets import ALL_PRESETS, preset_options, workloads_for
from expertile.lab.measure.env import known_keys
from expertile.lab.operators import operators, presets
from expertile.lab.race.operator import Workload
from expertile.lab.race.routing import draw
from expertile.lab.race.routing_file import SUFFIXES
from expertile.lab.race.workloads import RAGGED_DIM, GroupedWorkload, grouped
from expertile.ops.grouped_mm.problem import Layout
from expertile.suggest import one_of

POLICIES = ("graph", "eager", "both")
OPTIONS = ("routing", "tokens", "batch", "seq", "seed")  # that presets take
_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


@dataclass(frozen=True)
class BenchSpec:
    """What to measure and how, by the keys of a bench file; `inline` are its [[workload]] tables."""

    presets: tuple[str, ...] = ()
    inline: tuple[Workload, ...] = ()
    include: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    policy: str = "both"
    rounds: int | None = None
    quick: bool = False
    full: bool = False
    memory: bool = False
    routing: str | None = None
    tokens: tuple[int, ...] | None = None
    batch: int | None = None
    seq: int | None = None
    seed: int | None = None
    out: str | None = None

    def __post_init__(self) -> None:
        for name in self.presets:
            if name not in ALL_PRESETS:
                raise ValueError(f"presets: expected {one_of(name, ALL_PRESETS)}")
        if self.policy not in POLICIES:
            raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {self.policy!r}")
        for name in self.include:
            if name in self.skip:
                raise ValueError(f"include, skip: expected a backend in one of the two, got {name!r} in both")
        for key, least in (("rounds", 1), ("batch", 1), ("seq", 1), ("seed", 0)):
            value = getattr(self, key)
            if value is not None and value < least:
                raise ValueError(f"{key}: expected {least} or more, got {value}")
        for value in self.tokens or ():
            if value < 1:
                raise ValueError(f"tokens: expected 1 or more, got {value}")
        names = [w.name for w in self.inline]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise ValueError(f"workload: name: expected a name of its own, got {name!r} a second time")

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies to measure: ("graph", "eager") for "both"."""
        return ("graph", "eager") if self.policy == "both" else (self.policy,)

    def chooses(self, backend: str) -> bool:
        """Whether a backend of that name is among `include` (empty: all are) and not in `skip`."""
        return (not self.include or backend in self.include) and backend not in self.skip

    @property
    def options(self) -> dict[str, Any]:
        """Those of `OPTIONS`, None where one is not given; the seed too where it drew only sizes of `inline`."""
        found = {option: getattr(self, option) for option in OPTIONS}
        drawn = any(isinstance(w, GroupedWorkload) and w.routing != "given" for w in self.inline)
        if drawn and not any("seed" in preset_options(name) for name in self.presets):
            found["seed"] = None
        return found

    def workloads(self) -> tuple[Workload, ...]:
        """The workloads of the presets, then the inline ones; with `only`, those whose names match one of its patterns
        ("wgrad-*"). ValueError for an option no preset takes."""
        presets = workloads_for(self.presets, **self.options)
        found = (*presets, *self.inline)
        return tuple(w for w in found if not self.only or any(fnmatchcase(w.name, p) for p in self.only))


def read_bench_file(path: str | Path, seed: int | None = None) -> BenchSpec:
    """Read a TOML bench file, with `seed`, if given, in place of its own. ValueError names the file, the key, what
    was expected and what came; FileNotFoundError."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"bench file {path} {'is a folder' if path.is_dir() else 'does not exist'}")
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return _spec(data if seed is None else {**data, "seed": seed}, path.parent)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: expected TOML: {error}") from None
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _spec(data: Mapping[str, Any], folder: Path) -> BenchSpec:
    known_keys("", data, (*(f.name for f in fields(BenchSpec) if f.name != "inline"), "workload"))
    values = _checked("", data, _KEYS)
    if "routing" in values:
        values["routing"] = _beside(values["routing"], folder)
    values["candidates"] = tuple(_candidate(c, folder) for c in values.get("candidates", ()))
    tables = data.get("workload", [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise ValueError(f"workload: expected [[workload]] tables, got {tables!r}")
    inline = tuple(_workload(f"workload[{i}].", t, folder, values.get("seed", 0)) for i, t in enumerate(tables))
    return BenchSpec(inline=inline, **values)


def _workload(where: str, table: Mapping[str, Any], folder: Path, seed: int) -> Workload:
    if "op" in table:
        return _op_workload(where, table)
    known_keys(where, table, _WORKLOAD_KEYS)
    for key in ("name", "dtype"):
        if key not in table:
            raise ValueError(f"{where}{key}: expected a string, got nothing")
    _checked(where, table, _WORKLOAD_KEYS)
    if table.get("layout", Layout.RAGGED_M) not in [*Layout]:
        raise ValueError(f"{where}layout: expected one of {', '.join(Layout)}, got {table['layout']!r}")
    layout = Layout(table.get("layout", Layout.RAGGED_M))
    ragged = RAGGED_DIM.get(layout)
    for key in ("m", "n", "k"):
        if key == ragged and key in table:
            raise ValueError(f"{where}{key}: expected none, since group_sizes decide it for {layout.value}")
        if key != ragged and key not in table:
            raise ValueError(f"{where}{key}: expected an integer for {layout.value}, got nothing")
    sizes, routing = _group_sizes(where, table, layout, folder, seed)
    dims = {key: table.get(key, sum(sizes)) for key in ("m", "n", "k")}
    extra = {key: table[key] for key in ("a_layout", "b_layout", "note") if key in table}
    try:
        return grouped(table["name"], "file", layout, sizes, dtype=table["dtype"], routing=routing, **dims, **extra)
    except ValueError as error:
        raise ValueError(f"{where.rstrip('.')}: {error}") from None


def _op_workload(where: str, table: Mapping[str, Any]) -> Workload:
    """A call of an operator other than the grouped product."""
    known_keys(where, table, ("name", "op", "dtype", "dims"))
    for key in ("name", "op", "dtype"):
        _typed(str)(f"{where}{key}", table.get(key))
    if not isinstance(table.get("dims"), dict):
        raise ValueError(f"{where}dims: expected a table of dimensions, got {table.get('dims')!r}")
    try:
        return custom(table["name"], table["op"], table["dims"], table["dtype"])
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


def custom(name: str, op: str, dims: Mapping[str, Any], dtype: str) -> Workload:
    """A call of `op` over `dims`, which must be those of the operator's workloads in the presets, of the same types.
    ValueError names what was expected and what came."""
    known = dict.fromkeys(operators())
    if op not in known:
        raise ValueError(f"op: expected one of {', '.join(known)}, got {op!r}")
    example = next(w for build in presets().values() for w in build() if w.op == op)
    for key in dims:
        if key not in dict(example.dims):
            raise ValueError(f"dims.{key}: expected {_described(example)} for {op}, got {key!r}")
    for key, value in example.dims:
        if key not in dims:
            raise ValueError(f"dims.{key}: expected {_described(example)} for {op}, got no {key!r}")
        _typed(type(value))(f"dims.{key}", dims[key])
        if type(value) is int and dims[key] < 0:
            raise ValueError(f"dims.{key}: expected 0 or more, got {dims[key]!r}")
    if (dtype == "fp8") != (example.dtype == "fp8"):
        expected = "fp8" if example.dtype == "fp8" else "fp32, bf16 or fp16"
        raise ValueError(f"dtype: expected {expected} for {op}, got {dtype!r}")
    return Workload(name, "file", op, tuple((key, dims[key]) for key, _ in example.dims), dtype)


def _described(example: Workload) -> str:
    return ", ".join(f"{key} ({_KINDS[type(value)]})" for key, value in example.dims)


def _group_sizes(
    where: str, table: Mapping[str, Any], layout: Layout, folder: Path, seed: int
) -> tuple[tuple[int, ...], str]:
    """Group sizes as given, equal (batched) or drawn; and how they were drawn."""
    drawn = [key for key in ("groups", "tokens", "top_k", "routing", "seed") if key in table]
    if "group_sizes" in table:
        if drawn:
            raise ValueError(f"{where}{drawn[0]}: expected none beside group_sizes")
        return _integers(f"{where}group_sizes", table["group_sizes"]), "given"
    if "groups" not in table:
        raise ValueError(f"{where}group_sizes: expected a list of integers, or groups and tokens; got neither")
    if layout is Layout.BATCHED:
        if len(drawn) > 1:
            raise ValueError(f"{where}{drawn[1]}: expected none for a batched product")
        return (table["m"],) * table["groups"], "balanced"
    routing = _beside(table.get("routing", "balanced"), folder)
    if "tokens" not in table and not routing.endswith(SUFFIXES):
        raise ValueError(f"{where}tokens: expected an integer beside groups, got nothing")
    tokens, top_k, seed = table.get("tokens", 0), table.get("top_k", 1), table.get("seed", seed)
    try:
        draws = draw(routing, tokens, table["groups"], top_k, seed)
    except ValueError as error:
        raise ValueError(f"{where.rstrip('.')}: {error}") from None
    if len(draws) != 1:
        raise ValueError(f"{where}routing: expected a routing file with one layer, got {len(draws)} layers")
    return draws[0].group_sizes, draws[0].label


def _beside(routing: str, folder: Path) -> str:
    return str(folder / routing) if routing.endswith(SUFFIXES) else routing


def _candidate(text: str, folder: Path) -> str:
    file, colon, function = text.rpartition(":")
    if not colon or not file or not function.isidentifier():
        raise ValueError(f"candidates: expected FILE.py:FUNCTION, got {text!r}")
    return f"{folder / file}:{function}"


def _checked(where: str, data: Mapping[str, Any], readers: Mapping[str, Callable[[str, Any], Any]]) -> dict[str, Any]:
    """The values of `data` that have a reader, in the readers' order."""
    return {key: read(where + key, data[key]) for key, read in readers.items() if key in data}


def _typed(kind: type) -> Callable[[str, Any], Any]:
    """Reads a value of `kind` and no other: true is no integer."""

    def read(key: str, value: Any) -> Any:
        if type(value) is not kind:
            raise ValueError(f"{key}: expected {_KINDS[kind]}, got {value!r}")
        return value

    return read


def _strings(key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{key}: expected a list of strings, got {value!r}")
    return tuple(value)


def _integers(key: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        return (_typed(int)(key, value),)
    return tuple(_typed(int)(f"{key}[{i}]", v) for i, v in enumerate(value))


# What a file may say, in the order in which it is checked; `group_sizes` is read where it counts.
_KEYS: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("presets", "include", "skip", "only", "candidates"), _strings),
    **dict.fromkeys(("policy", "routing", "out"), _typed(str)),
    **dict.fromkeys(("rounds", "batch", "seq", "seed"), _typed(int)),
    **dict.fromkeys(("quick", "full", "memory"), _typed(bool)),
    "tokens": _integers,
}
_WORKLOAD_KEYS: Mapping[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(("name", "layout", "dtype"), _typed(str)),
    **dict.fromkeys(("m", "n", "k"), _typed(int)),
    "group_sizes": lambda key, value: value,
    **dict.fromkeys(("groups", "tokens", "top_k"), _typed(int)),
    "routing": _typed(str),
    "seed": _typed(int),
    **dict.fromkeys(("a_layout", "b_layout", "note"), _typed(str)),
}
