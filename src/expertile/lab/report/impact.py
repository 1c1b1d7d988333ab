"""What recorded times mean for a served model: seconds saved in a forward pass, GPU-hours in a day.

Both times of an operator come from one run. An operator without such records is left out and named.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from expertile.device import Device
from expertile.lab.race.record import POLICIES, Record
from expertile.lab.race.workloads import ragged_m
from expertile.ops.grouped_mm.backends import BACKENDS
from expertile.ops.grouped_mm.choose import choose
from expertile.suggest import one_of

TORCH = "torch"
# What "torch" is called in the records of an operator: F.grouped_mm, and what F.sdpa takes by default.
_TORCH_NAMES = {"grouped_mm": "torch_grouped", "attention": "sdpa_fa2"}


@dataclass(frozen=True)
class Model:
    """What a forward pass calls. `norms`: (rows a token, cols, calls) each. `attention`: heads, key heads, elements of
    a head, causal, calls, and why it is left out, or "". `experts`: E, k, H, I, layers. `batch`: sequences."""

    norm: str
    norms: tuple[tuple[int, int, int], ...]
    attention: tuple[int, int, int, bool, int, str]
    experts: tuple[int, int, int, int, int] | None
    dtype: str = "bf16"
    batch: int = 16


# By config.json of each; BERT's dtype and batch are report 004's.
MODELS = {
    "bert-base": Model("layer_norm", ((1, 768, 25),), (12, 12, 64, False, 12, ""), None, "fp32", 32),
    "mixtral-8x7b": Model("rms_norm", ((1, 4096, 65),), (32, 8, 128, True, 32, ""), (8, 2, 4096, 14336, 32)),
    "deepseek-v3": Model(
        "rms_norm",
        ((1, 7168, 123), (1, 1536, 61), (1, 512, 61)),
        (128, 128, 192, True, 61, "keys of 192 elements beside values of 128 are not supported"),
        (256, 8, 7168, 2048, 58),
    ),
    "qwen3-30b-a3b": Model(
        "rms_norm", ((1, 2048, 97), (32, 128, 48), (4, 128, 48)), (32, 4, 128, True, 48, ""), (128, 8, 2048, 768, 48)
    ),
    "gpt-oss-120b": Model(
        "rms_norm",
        ((1, 2880, 73),),
        (64, 8, 64, True, 36, "attention sinks are not supported"),
        (128, 4, 2880, 2880, 36),
    ),
}


@dataclass(frozen=True)
class Line:
    """`count` calls of an operator in a pass: the records of the baseline and of ours, or why it is left out."""

    op: str
    dims: dict[str, Any]
    count: int
    reason: str = ""
    pair: tuple[Record, Record] | None = None


def uses(model: str, batch: int, seq_len: int) -> Iterator[Line]:
    """The calls of one forward pass of `batch` sequences."""
    found, tokens = MODELS[model], batch * seq_len
    for rows, cols, calls in found.norms:
        yield Line(found.norm, {"rows": tokens * rows, "cols": cols}, calls)
    heads, kv_heads, dim, causal, count, why = found.attention
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "q_len": seq_len, "k_len": seq_len}
    yield Line("attention", sizes | {"head_dim": dim, "causal": causal}, count, why)
    if found.experts:
        groups, top_k, hidden, ffn, layers = found.experts
        for k, n in ((hidden, 2 * ffn), (ffn, hidden)):
            yield Line(
                "grouped_mm", {"layout": "ragged_m", "groups": groups, "m": tokens * top_k, "n": n, "k": k}, layers
            )


def impact(
    model: str,
    records: Iterable[Record],
    device: Device,
    *,
    batch: int | None = None,
    seq_len: int = 512,
    dtype: str | None = None,
    policy: str = "graph",
    baseline: str = TORCH,
) -> list[Line]:
    """The operators of one forward pass of `model` with their times on `device`; batch and dtype are the model's own by
    default. Raises ValueError naming the argument, what was expected and what came."""
    for name, value, known in (("model", model, MODELS), ("policy", policy, POLICIES)):
        if value not in known:
            raise ValueError(f"{name}: expected {one_of(value, known)}")
    records = list(records)
    ops = {line.op for line in uses(model, 1, 1)}
    baselines = dict.fromkeys([TORCH, *sorted({r.backend for r in records if r.op in ops})])
    if baseline not in baselines and records:
        raise ValueError(f"baseline: expected {one_of(baseline, baselines)}")
    dtype, batch = dtype or MODELS[model].dtype, MODELS[model].batch if batch is None else batch
    if min(batch, seq_len) < 1:
        raise ValueError(f"batch, seq_len: expected 1 or more, got {batch} and {seq_len}")
    found = [r for r in records if (r.status, r.policy, r.env.gpu, r.dtype) == ("ok", policy, device.name, dtype)]
    return [_filled(line, found, device, dtype, baseline) for line in uses(model, batch, seq_len)]


def _filled(line: Line, records: Sequence[Record], device: Device, dtype: str, baseline: str) -> Line:
    """With the two records of the latest run that has both."""
    if line.reason:
        return line
    theirs = _TORCH_NAMES.get(line.op, baseline) if baseline == TORCH else baseline
    ours = "expertile-auto" if line.op == "attention" else "expertile"
    by_run: dict[tuple[str, str], dict[str, Record]] = {}
    for r in records:
        if r.op == line.op and r.time_s and line.dims.items() <= r.shape.items():
            by_run.setdefault((r.run, r.workload), {}).setdefault(r.backend, r)
    if line.op == "grouped_mm":  # of what ran beside the other, what `auto` chooses; the host does not know the sizes
        d = line.dims
        even = [d["m"] // d["groups"] + (g < d["m"] % d["groups"]) for g in range(d["groups"])]
        problem = ragged_m("impact", "", even, d["k"], d["n"], dtype).problem(device.kind).with_sizes(None)
        ran = {name for found in by_run.values() if theirs in found for name in found}
        recorded = tuple(b for b in BACKENDS if b.name in ran) or BACKENDS
        ours = choose(problem, device, recorded, quiet=True).backend.name
    both = [(found[theirs], found[ours]) for found in by_run.values() if {theirs, ours} <= found.keys()]
    reason = "" if both else f"no record of {theirs} and {ours} in one run"
    return Line(line.op, line.dims, line.count, reason, max(both, key=lambda pair: pair[1].date, default=None))
