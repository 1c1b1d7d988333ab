"""Presets: named lists of workloads, each a source's exact shapes, dtypes and row distributions. `PRESETS` are of
grouped products, a function and its line in `_GROUPED` each; `ALL_PRESETS` has those of other operators
(`lab/operators`) too."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from expertile.device import Device
from expertile.lab import operators
from expertile.lab.bench import sweeps
from expertile.lab.operators import end_to_end
from expertile.lab.operators.products import REAL_MODELS, model_products
from expertile.lab.race.operator import Workload
from expertile.lab.race.routing import Routing, draw, parse_routing
from expertile.lab.race.workloads import GroupedWorkload, ragged_m, wgrad
from expertile.suggest import one_of

# Report 000's configurations: (matrices, side).
_SQUARES = ((4, 512), (16, 512), (8, 1024), (64, 1024), (16, 2048), (32, 2048))

# Report 001 prints the first three experts of eight and elides the rest; these five lie, as its three do,
# within 15 % of the mean and complete its 16384 tokens.
_MOE_FFN_COUNTS = (1842, 2341, 1756, 2103, 1987, 2254, 1881, 2220)


def _squares(routing: str = "zipf(1)", seed: int = 0) -> list[GroupedWorkload]:
    """Report 000: 4 to 64 products of 512³ to 2048³, fp16, each also with its rows spread unevenly."""
    out = []
    for groups, side in _SQUARES:
        square = ragged_m(f"{groups}x{side}", "squares", (side,) * groups, side, side, "fp16", routing="balanced")
        ragged = replace(square, name=f"{square.name}-ragged")
        out += [square, *_route(ragged, routing, groups * side, 1, seed)]
    return out


def _moe_ffn(routing: str | None = None, seed: int = 0) -> list[GroupedWorkload]:
    """Report 001's feed-forward layer: 8 experts, 4096 ↔ 14336, 16384 tokens, top-1 and top-2, bf16."""
    out = []
    for top_k in (1, 2):
        counts = [c * top_k for c in _MOE_FFN_COUNTS]
        for projection, k, n in (("up", 4096, 14336), ("down", 14336, 4096)):
            note = "experts 0-2 as report 001 prints them, the five it elides completed to 16384 tokens"
            name = f"moe-ffn-{projection}-top{top_k}"
            workload = ragged_m(name, "moe-ffn", counts, k, n, "bf16", routing="report 001", note=note)
            out += [workload] if routing is None else _route(replace(workload, note=""), routing, 16384, top_k, seed)
    return out


def _models(
    tokens: int | Sequence[int] | None = None,
    batch: int = 16,
    seq: int = 512,
    routing: str | None = None,
    seed: int = 0,
) -> list[GroupedWorkload]:
    """Report 003's four models and four real ones: gate-up (N = 2·FFN, both halves of SwiGLU) and down projections.

    Prefill has batch·seq tokens (16 × 512 as report 003's full benchmark), decode one for each of the batch; `tokens`
    takes the place of both. Without `routing` the report's models are routed as its benchmark does (`skewed`), the real
    ones `uniform`."""
    phases = {"prefill": batch * seq, "decode": batch}
    if tokens is not None:
        phases = {f"tokens{t}": t for t in ([tokens] if isinstance(tokens, int) else tokens)}
    for phase, count in phases.items():
        if count < 1:
            raise ValueError(f"tokens: expected 1 or more for {phase}, got {count}")
    given = None if routing is None else parse_routing(routing)
    out = []
    for name, dims, note in model_products(phases, REAL_MODELS):
        d: dict[str, Any] = dict(dims)
        base = ragged_m(name, "models", (0,) * d["groups"], d["k"], d["n"], "bf16", note=note)
        out += _route(base, given or d["routing"], d["tokens"], d["top_k"], seed)
    return out


# name, groups, tokens, top-k, K (of a gradient M), N, dtype, routing
_Row = tuple[str, int, int, int, int, int, str, str]
_ANCHORS: tuple[_Row, ...] = (
    ("moe-ffn-up", 8, 16384, 1, 4096, 14336, "bf16", "uneven(0.15)"),
    ("mixtral-zipf", 8, 16384, 1, 4096, 14336, "bf16", "zipf(1)"),
    ("mixtral-small", 8, 1024, 2, 4096, 14336, "bf16", "uniform"),
    ("g128-gate-up", 128, 32768, 8, 4096, 2048, "bf16", "uniform"),
    ("g128-down", 128, 32768, 8, 1024, 4096, "bf16", "uniform"),
    ("g64-up", 64, 8192, 8, 4096, 11008, "bf16", "uniform"),
    ("g8-wide-k", 8, 16384, 2, 7168, 4096, "bf16", "uniform"),
    ("64x1024", 64, 65536, 1, 1024, 1024, "bf16", "balanced"),
    ("32x2048", 32, 65536, 1, 2048, 2048, "bf16", "balanced"),
    ("8x1024", 8, 8192, 1, 1024, 1024, "bf16", "balanced"),
    ("16x512", 16, 8192, 1, 512, 512, "bf16", "balanced"),
    ("decode-g128-128", 128, 16, 8, 2048, 1536, "bf16", "balanced"),
    ("decode-g128-1024", 128, 128, 8, 2048, 1536, "bf16", "uniform"),
    ("decode-g256-1024", 256, 128, 8, 7168, 4096, "bf16", "zipf(1)"),
    ("prefill-g256-65536", 256, 8192, 8, 7168, 4096, "bf16", "zipf(1)"),
)
_WGRADS: tuple[_Row, ...] = (
    ("wgrad-moe-ffn-up", 8, 16384, 1, 4096, 14336, "bf16", "uneven(0.15)"),
    ("wgrad-g128-gate-up", 128, 32768, 8, 4096, 2048, "bf16", "uniform"),
    ("wgrad-g128-down", 128, 32768, 8, 1024, 4096, "bf16", "uniform"),
    ("wgrad-g64-up", 64, 8192, 8, 4096, 11008, "bf16", "uniform"),
    ("wgrad-g128-8192", 128, 1024, 8, 2048, 768, "bf16", "uniform"),
    ("wgrad-g256-65536", 256, 8192, 8, 2048, 1024, "bf16", "zipf(1)"),
)
_CPU: tuple[_Row, ...] = (
    ("cpu-4x256", 4, 1024, 1, 256, 256, "fp32", "balanced"),
    ("cpu-4x256-ragged", 4, 1024, 1, 256, 256, "fp32", "zipf(1)"),
    ("cpu-16x128", 16, 2048, 1, 128, 128, "fp32", "balanced"),
    ("cpu-debug-gate-up", 4, 256, 2, 512, 2048, "bf16", "skewed"),
    ("cpu-debug-down", 4, 256, 2, 1024, 512, "bf16", "skewed"),
    ("cpu-debug-gate-up-fp32", 4, 128, 2, 512, 2048, "fp32", "skewed"),
    ("cpu-many-experts", 32, 256, 4, 256, 512, "bf16", "uniform"),
    ("cpu-many-experts-decode", 32, 8, 4, 512, 512, "bf16", "uniform"),
    ("cpu-one-expert", 8, 512, 1, 512, 512, "bf16", "one-expert"),
    ("cpu-half-empty", 8, 512, 1, 512, 512, "bf16", "half-empty"),
)
_LADDER: tuple[_Row, ...] = (  # one that compute limits, report 000's two largest lists of squares, one of decode
    ("moe-ffn-up", 8, 16384, 1, 4096, 14336, "bf16", "uneven(0.15)"),
    ("64x1024", 64, 65536, 1, 1024, 1024, "fp16", "balanced"),
    ("16x2048", 16, 32768, 1, 2048, 2048, "fp16", "balanced"),
    ("decode", 128, 128, 8, 2048, 1536, "bf16", "uniform"),
)


def _drawn(preset: str, rows: Sequence[_Row], seed: int, make: Any = ragged_m) -> list[GroupedWorkload]:
    """Products with weights [G, N, K] passed transposed, or by `make`=`wgrad` weight gradients."""
    out = []
    for name, groups, tokens, top_k, first, n, dtype, routing in rows:
        out += _route(make(name, preset, (0,) * groups, first, n, dtype), routing, tokens, top_k, seed)
    return out


def _anchors(seed: int = 0) -> list[GroupedWorkload]:
    """Grouped products and weight gradients at the sizes of well-known models."""
    return _drawn("anchors", _ANCHORS, seed) + _drawn("anchors", _WGRADS, seed, wgrad)


def _cpu(seed: int = 0) -> list[GroupedWorkload]:
    """Small products that a CPU multiplies in milliseconds and a GPU in microseconds: the layouts, row distributions
    and regimes (compute, decode, empty groups) that the large presets have."""
    gradient: _Row = ("cpu-debug-wgrad", 4, 256, 2, 512, 1024, "bf16", "skewed")
    return _drawn("cpu", _CPU, seed) + _drawn("cpu", [gradient], seed, wgrad)


def _route(
    workload: GroupedWorkload, routing: Routing | str, tokens: int, top_k: int, seed: int
) -> list[GroupedWorkload]:
    """`workload` with rows drawn from `routing`: one for each layer of a file, else one. A file for another number of
    experts leaves it listed as unsupported, with the reason."""
    routing = parse_routing(routing) if isinstance(routing, str) else routing
    if routing.file is not None and routing.file.num_experts != workload.groups:
        reason = f"{routing.name} has {routing.file.num_experts} experts, this workload {workload.groups}"
        return [replace(workload, routing=routing.name, unsupported=workload.unsupported or reason)]
    return [
        workload.with_sizes(
            d.group_sizes, name=f"{workload.name}:{d.layer}" if d.layer else workload.name, routing=d.label
        )
        for d in draw(routing, tokens, workload.groups, top_k, seed)
    ]


_GROUPED: Mapping[str, Callable[..., Sequence[GroupedWorkload]]] = MappingProxyType(
    {
        "squares": _squares,
        "moe-ffn": _moe_ffn,
        "models": _models,
        "anchors": _anchors,
        # The weight gradients, and the input gradients of the forward products that compute limits.
        "gradients": lambda seed=0: sweeps.gradients(_anchors(seed)),
        "scaling": sweeps.scaling,
        "skew": sweeps.skew,
        "cpu": _cpu,
        "ladder": lambda seed=0: _drawn("ladder", _LADDER, seed),
        # Whole models are no workloads: `operators.end_to_end.measure` measures them itself.
        end_to_end.TRAIN: lambda: (),
        end_to_end.SERVE: lambda: (),
    }
)

PRESETS = tuple(_GROUPED)
ALL_PRESETS = (*PRESETS, *operators.presets())


def preset_options(name: str) -> tuple[str, ...]:
    """The options that preset `name` takes. ValueError for an unknown preset."""
    return tuple(inspect.signature(_builder(name)).parameters)


def preset(name: str, **options: Any) -> tuple[Any, ...]:
    """The workloads of preset `name`, their names unique within it. Options (each preset takes those that mean
    something to it): `routing` (a spec of `routing.parse_routing`), `seed`, and for "models" `tokens` (one count or
    several), `batch`, `seq`; None: the default. ValueError for an unknown preset or option, naming the known ones."""
    known = preset_options(name)
    for option in options:
        if option not in known:
            raise ValueError(f"preset {name!r}: expected options {', '.join(known) or '(none)'}, got {option!r}")
    return tuple(_builder(name)(**{k: v for k, v in options.items() if v is not None}))


def check_options(names: Sequence[str], **options: Any) -> None:
    """ValueError for an option that is given and that none of the presets takes."""
    for option in (k for k, v in options.items() if v is not None):
        if not any(option in preset_options(name) for name in names):
            takers = [p for p in PRESETS if option in preset_options(p)]
            raise ValueError(
                f"{option}: expected a preset that takes this option ({', '.join(takers) or 'none does'}), "
                f"got {', '.join(names) or 'no preset'}"
            )


def workloads_for(names: Sequence[str], **options: Any) -> tuple[Workload, ...]:
    """The workloads of several of `ALL_PRESETS`; each option goes to the presets that take it. ValueError if none
    does."""
    check_options(names, **options)
    given = {k: v for k, v in options.items() if v is not None}
    found: list[Workload] = []
    for name in names:
        found += preset(name, **{k: v for k, v in given.items() if k in preset_options(name)})
    return tuple(found)


def default_preset(device: Device) -> tuple[str, ...]:
    """The presets that suit `device`: the large ones on a GPU with bfloat16 matrix units (sm_80 on), else "cpu"."""
    if device.kind == "cuda" and device.capability is not None and device.capability >= (8, 0):
        return ("squares", "moe-ffn", "models")
    return ("cpu",)


def _builder(name: str) -> Callable[..., Sequence[Workload]]:
    if name not in ALL_PRESETS:
        raise ValueError(f"preset: expected {one_of(name, ALL_PRESETS)}")
    return _GROUPED[name] if name in _GROUPED else operators.presets()[name]
