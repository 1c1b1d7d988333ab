"""The figures of docs/results/quantised.md, put between its markers: times from records, sizes and errors from
arithmetic.

Blocks: `sweep` and `large` (FP8 products), `causes` (report 002's suspicions), `models` (report 003's table of memory
and speed), `errors` (what quantising costs in accuracy), `quantisers`. A block NAME stands between
<!-- expertile:quantised NAME --> and <!-- /expertile:quantised NAME -->; all else in the page stays byte for byte.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import torch

from expertile.device import Device
from expertile.formats.fp8 import Fp8Blocks
from expertile.formats.int4.weight import Int4Weight
from expertile.lab.operators.products import PHASES, REPORT_MODELS
from expertile.lab.race.record import Record
from expertile.lab.report.units import MISSING, cell, markdown_table, micros, percent, significant, times
from tools.pages.recorded import NOT_MEASURED, OURS, Times, by_name, ok, recorded, to_ours

PRESETS = ("fp8-sweep", "fp8-large", "fp8-causes", "quantize", "int4-models")

_INT4_GROUPS = (32, 64, 128, 0)
_KINDS = {"bf16": "bf16", "fp8": "FP8", "int4": "INT4"}


def blocks(records: Iterable[Record], device: Device) -> dict[str, str]:
    """The text of every block, by name, from the records of `device`. Of each preset the latest run counts;
    of one with two operators each one's."""
    here = [r for r in records if r.env.gpu == device.name]
    tables: Mapping[str, tuple[str, Callable[[Times], list[str]]]] = {
        "sweep": ("fp8-sweep", _sweep),
        "large": ("fp8-large", _large),
        "causes": ("fp8-causes", _causes),
        "quantisers": ("quantize", _quantisers),
        "models": ("int4-models", _models),
    }
    texts = {}
    for name, (preset, table) in tables.items():
        run = _latest(here, preset)
        lines = table(by_name(run)) if run else []
        texts[name] = "\n\n".join([recorded(run), *lines]) if lines else NOT_MEASURED
    return {**texts, "errors": errors_block()}


def _latest(records: Sequence[Record], preset: str) -> list[Record]:
    """All records of the last run that measured something of `preset`, for each operator in it."""
    last = {r.op: r.run for r in records if r.workload.startswith(f"{preset}/") and r.status == "ok"}
    return [r for r in records if r.run == last.get(r.op)]


def _time(record: Record | None) -> float | None:
    return None if record is None else record.time_s


def _timed(found: Times, op: str, preset: str) -> list[tuple[str, Record]]:
    """(workload, our record under CUDA-graph replay) where ours has a time."""
    names = dict.fromkeys(w for o, w, _, _ in found if o == op and w.startswith(f"{preset}/"))
    return [(name, ours) for name in names if (ours := ok(found, op, name, OURS))]


def _rates(record: Record) -> list[str]:
    share = record.bound_s / record.time_s if record.time_s and record.bound_s else None
    tflops, gbps = record.tflops or 0.0, record.gbps or 0.0
    return [micros(record.time_s), significant(tflops), significant(gbps / 1e3), percent(share)]


def _sweep(found: Times) -> list[str]:
    op, body = "scaled_grouped_mm", []
    workloads = _timed(found, op, "fp8-sweep")
    # A specialised rival has a column where it ran beside ours, and a sentence where it did not.
    deepgemm = any(ok(found, op, name, "deepgemm") for name, _ in workloads)
    rivals = ("torch", "bf16", "deepgemm") if deepgemm else ("torch", "bf16")
    for name, ours in workloads:
        s = ours.shape
        sizes = (s["groups"], s["tokens"] * s["top_k"] // s["groups"], s["n"], s["k"])
        eager = micros(_time(ok(found, op, name, OURS, "eager")))
        body.append(
            [*map(str, sizes), *_rates(ours), eager, *(to_ours(ok(found, op, name, rival), ours) for rival in rivals)]
        )
    if not body:
        return []
    lead = (
        "Time under CUDA-graph replay, inputs out of cache; *eager* is one call from Python. *torch* (row-wise scales) "
        "and *bf16* (our `grouped_mm`): how many times as long."
    )
    lead += " *deepgemm*: the same." if deepgemm else " DeepGEMM has no time in this run."
    header = ["E", "rows each", "N", "K", "µs", "TFLOP/s", "TB/s", "of bound", "eager, µs", *rivals]
    return [lead, markdown_table(header, body, left=0)]


def _large(found: Times) -> list[str]:
    op, body = "scaled_grouped_mm", []
    workloads = _timed(found, op, "fp8-large")
    rivals = ("deepgemm", "dense", "copy", "torch", "bf16")
    others = [rival for rival in rivals if any(ok(found, op, name, rival) for name, _ in workloads)]
    for name, ours in workloads:
        beside = (to_ours(ok(found, op, name, other), ours) for other in others)
        body.append([cell(name.partition("/")[2]), *_rates(ours), *beside])
    header = ["workload", "µs", "TFLOP/s", "TB/s", "of bound", *others]
    return [markdown_table(header, body)] if body else []


def _causes(found: Times) -> list[str]:
    op, body = "fp8_causes", []
    for name, ours in _timed(found, op, "fp8-causes"):
        eager = ok(found, op, name, OURS, "eager")
        variants = [ok(found, op, name, f"{OURS}-{v}") for v in ("row", "vector", "triton_fp8", "padded")]
        padded = ok(found, op, name, f"{OURS}-padded", "eager")
        wrong = found.get((op, name, "multiplied", "eager")) or found.get((op, name, "multiplied", "graph"))
        error = MISSING if wrong is None or wrong.rel_error is None else significant(wrong.rel_error)
        body.append(
            [
                cell(name.partition("/")[2]),
                micros(ours.time_s),
                *(to_ours(v, ours) for v in variants),
                micros(_time(eager)),
                MISSING if eager is None else to_ours(padded, eager),
                error,
            ]
        )
    if not body:
        return []
    header = (
        "shape | µs | one scale a row (cause 1) | 128× the weights' scales (2) | scales loaded when needed (2) | "
        "padded in torch (4) | eager, µs | eager, padded (4) | relative error of multiplied scales"
    )
    return ["How many times as long as ours, under CUDA-graph replay unless said.", markdown_table(header, body)]


def _quantisers(found: Times) -> list[str]:
    op, body = "quantize_fp8", []
    for name, ours in _timed(found, op, "quantize"):
        others = (to_ours(ok(found, op, name, rival), ours) for rival in ("copy", "torch.compile", "torch"))
        rate = significant((ours.gbps or 0.0) / 1e3)
        body.append([cell(name.partition("/")[2]), micros(ours.time_s), rate, *others])
    header = ["call", "µs", "TB/s", "copy", "torch.compile", "torch"]
    return [markdown_table(header, body)] if body else []


def weight_nbytes(model: str, kind: str) -> float:
    """Bytes of the experts' three matrices: "bf16", "fp8" (128×128 scales), "int4" (group 128, symmetric)."""
    experts, hidden, ffn, _ = REPORT_MODELS[model]
    each = {"bf16": 2.0, "fp8": 1 + 4 / 128**2, "int4": 0.5 + 2 / 128}[kind]
    return 3.0 * experts * hidden * ffn * each


def _both(found: Times, op: str, model: str, phase: str, backend: str) -> float | None:
    """Seconds of both products of a layer, or None unless both were measured."""
    each = [
        _time(ok(found, op, f"int4-models/{model}-{projection}-{phase}", backend)) for projection in ("gate-up", "down")
    ]
    return None if None in each else sum(t for t in each if t)


def _models(found: Times) -> list[str]:
    ways = (("bf16", "int4_grouped_mm", "bf16"), ("fp8", "scaled_grouped_mm", OURS), ("int4", "int4_grouped_mm", OURS))
    errors = {"bf16": MISSING, "fp8": _shown(_error("fp8", 0)), "int4": _shown(_error("int4", 128))}
    body = []
    for model, (_, hidden, ffn, top_k) in REPORT_MODELS.items():
        for phase, tokens in PHASES.items():
            bf16 = {op: _both(found, op, model, phase, "bf16") for _, op, _ in ways}
            flops = 6.0 * tokens * top_k * hidden * ffn
            for kind, op, backend in ways:
                base = bf16[op] or next(filter(None, bf16.values()), None)
                # bf16 plays beside FP8 too.
                seconds = base if kind == "bf16" else _both(found, op, model, phase, backend)
                if seconds is not None:
                    body.append(
                        [
                            cell(model),
                            f"{phase} ({tokens})",
                            _KINDS[kind],
                            micros(seconds),
                            micros(base),
                            times(base / seconds) if base else MISSING,
                            significant(flops / seconds / 1e12),
                            significant(weight_nbytes(model, kind) / 1e9),
                            times(weight_nbytes(model, "bf16") / weight_nbytes(model, kind)),
                            errors[kind],
                        ]
                    )
    if not body:
        return []
    lead = (
        "Both expert products of one layer (gate and up together, and down; no activation, no routing), routed as the "
        "report's benchmark routes; bf16 is our own `grouped_mm`, and FP8 finds its activations quantised. The error "
        "is that of a product of normal data, below. *bf16, µs*: bf16 in the same race; FP8's is another "
        "race than the bf16 row's."
    )
    header = ["model", "tokens", "weights", "µs", "bf16, µs", "of bf16", "TFLOP/s", "GB of weights", "smaller", "error"]
    return [lead, markdown_table(header, body, left=3)]


def errors_block() -> str:
    """What quantising does to normally distributed weights, and to a product with normal activations."""
    body = [["e4m3, 128×128 scales; activations 1×128", *_pair("fp8", 0)]]
    body += [["e4m3, the same with power-of-two scales", *_pair("fp8", 1)]]
    for group in _INT4_GROUPS:
        for kind, zeros in (("int4", "symmetric"), ("int4-zeros", "with zero points")):
            label = f"group {group}" if group else "one scale a row"
            body.append([f"INT4, {label}, {zeros}", *_pair(kind, group)])
    header = ["weights", "of the weights", "of a product"]
    lead = (
        "Relative Frobenius error on normally distributed data (weights 512 × 2048, activations 64 × 2048, seed 0), "
        "worked out on a CPU in float32: for FP8 both operands are quantised, for INT4 the weights alone."
    )
    return f"{lead}\n\n{markdown_table(header, body)}"


def _pair(kind: str, option: int) -> tuple[str, str]:
    weights, _ = _errors(kind, option)
    return _shown(weights), _shown(_error(kind, option))


def _error(kind: str, option: int) -> float:
    return _errors(kind, option)[1]


def _shown(error: float) -> str:
    return f"{error * 100:.1f} %"


@lru_cache(maxsize=64)
def _errors(kind: str, option: int) -> tuple[float, float]:
    """(of the weights, of a product); `option`: group size (0: a row) of INT4, power-of-two scales of FP8."""
    generator = torch.Generator().manual_seed(0)
    w, a = (torch.randn(rows, 2048, generator=generator) for rows in (512, 64))
    if kind == "fp8":
        weights = Fp8Blocks.quantize(w, (128, 128), bool(option)).dequantize()
        rows = Fp8Blocks.quantize(a, (1, 128), bool(option)).dequantize()
    else:
        made = Int4Weight.quantize(w, option or None, symmetric=kind == "int4")
        weights, rows = made.dequantize(torch.float32)[0], a
    return _relative(weights, w), _relative(rows @ weights.t(), a @ w.t())


def _relative(made: torch.Tensor, truth: torch.Tensor) -> float:
    return float((made - truth).norm() / truth.norm())
