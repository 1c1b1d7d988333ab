"""How good `auto` is by its table alone: each problem measured on the GPU is left out and chosen for by all others.

No GPU is needed, and nothing is measured: the choice's time stands in the table. A choice that the table does not list
for the problem was screened out there, and counts as `transfer` counts such a one: 8 % slower than its backend's best
or than 1.1 times the best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from expertile.device import Device
from expertile.lab.bench.tune_verify import Verdict
from expertile.lab.race.workloads import grouped
from expertile.ops.grouped_mm.backend import Backend, config_dict
from expertile.ops.grouped_mm.backends import BACKENDS
from expertile.ops.grouped_mm.choose import NEIGHBOURS, by_measurement, rounded
from expertile.ops.grouped_mm.model import synchronises
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ops.grouped_mm.transfer import Rival, expected_slowdowns
from expertile.ops.grouped_mm.tuned import Features, Problems, Table, features_of, nearest


def left_out(
    table: Table, device: Device, backends: Sequence[Backend] = BACKENDS, policy: str = "graph"
) -> list[Verdict]:
    """`auto`'s choice among those of `backends` that run here, on each problem that `table` has of its own GPU, by all
    others; worst first.

    A problem counts where its measurement knew the chosen config's flags, and where it has neighbours.
    """
    found = list(_verdicts(table, device, backends, table.of(policy)))
    return sorted(found, key=lambda v: v.share)


def _verdicts(table: Table, device: Device, backends: Sequence[Backend], measured: Problems) -> Iterator[Verdict]:
    for left in measured:
        if left.gpu:
            continue
        problem = problem_of(left.features)
        able = [b for b in backends if b.supports(problem, device) is None and not synchronises(b, problem, device)]
        names = {b.name for b in able}
        ran = [t for t in left.times if t.backend in names]
        like = rounded(problem)
        around = nearest(measured, features_of(like), 2 * NEIGHBOURS)
        near = [(d, m) for d, m in around if m.features != left.features][:NEIGHBOURS]
        choice = by_measurement(like, device, able, near, table) if near and ran else None
        if choice is None:
            continue
        (log,) = expected_slowdowns([Rival(choice.backend, choice.config)], left.features, [(0.0, left)], device)
        if log is None:
            continue
        config = " ".join(f"{k}={v}" for k, v in config_dict(choice.config).items())
        best = " ".join([ran[0].backend, *(f"{k}={v}" for k, v in ran[0].config.items())])
        share = min(1.0, ran[0].seconds / (left.best * math.exp(log)))
        why = f"{choice.backend.name} {config}".strip()
        yield Verdict(f"{left.features} {left.features.skew}", choice.backend.name, share, best, why)


def problem_of(f: Features) -> Problem:
    """A problem with these features, bf16 for "16-bit", as a GPU's host sees it: sizes of ragged groups unknown."""
    layout = Layout(f.layout)
    a_layout, b_layout = f.orders.split(",")
    base, extra = divmod(f.rows, max(1, f.groups))
    sizes = [base + (g < extra) for g in range(f.groups)]
    m, n, k = {
        Layout.RAGGED_M: (f.rows, f.n, f.k),
        Layout.RAGGED_K: (f.k, f.n, f.rows),
        Layout.RAGGED_N: (f.n, f.rows, f.k),
        Layout.BATCHED: (base, f.n, f.k),
    }[layout]
    dtype = {"16-bit": "bf16", "tf32": "fp32"}.get(f.dtype, f.dtype)
    workload = grouped("left-out", "", layout, sizes, m, n, k, dtype, a_layout=a_layout, b_layout=b_layout)
    return workload.problem("cuda", f.dtype == "tf32").with_sizes(None)
