"""Operators in the lab on a real GPU: graph and eager, rivals that cannot be captured, poison, peak memory."""

import pytest
import torch

from expertile.lab.bench.run import run
from expertile.lab.bench.tune_verify import verdicts, verify
from expertile.lab.operators import operators, presets
from expertile.lab.race.memory import peak_memory
from expertile.lab.race.record import read
from expertile.lab.race.workloads import ragged_m
from tests.lab.operators.toy import operator, right, rival, workload

W = workload(2048, 4096, "bf16")
# Rivals that show an idea to be wrong: the gate has to say so, with an error that nobody takes for rounding.
WRONG = {"fp8_causes": {"multiplied"}}


def records(*rivals, **options):
    found = run([W], operators=[operator(*rivals)], device="cuda", quick=True, **options)
    return {(r.backend, r.policy): r for r in found}


def test_both_policies_have_times_above_the_bound():
    found = records(rival("expertile", right))
    assert {r.status for r in found.values()} == {"ok"}
    for policy in ("graph", "eager"):
        ours, copy = found["expertile", policy], found["copy", policy]
        assert ours.time_s >= ours.bound_s > 0 and ours.limiter == "memory"
        assert ours.env.sm_clock_mhz and copy.nbytes == pytest.approx(ours.nbytes, rel=1e-6)
    assert found["expertile", "graph"].time_s <= found["expertile", "eager"].time_s


def test_backward_calls_are_captured_too():
    def bind(w, inputs):
        x = inputs[0].detach().requires_grad_()
        y = (x * x).sum()
        return lambda: (torch.autograd.grad(y, x, retain_graph=True)[0], right(inputs[0])[1])

    found = records(rival("torch", right, bind=bind))
    assert {found["torch", policy].status for policy in ("graph", "eager")} == {"ok"}


def test_who_waits_for_the_host_has_an_eager_time_alone():
    def synchronises(x):
        torch.cuda.synchronize()
        return right(x)

    found = records(rival("says-so", synchronises, graph=False), rival("does-not", synchronises), rival("ok", right))
    assert found["says-so", "graph"].reason == "not measured: it cannot be captured in a CUDA graph"
    silent = found["does-not", "graph"]
    assert silent.status == "unsupported" and "cannot be captured" in silent.reason, silent
    assert found["says-so", "eager"].status == found["does-not", "eager"].status == "ok"
    assert found["ok", "graph"].status == "ok"


def test_an_element_that_nobody_writes_shows():
    def lazy(x):
        out = torch.empty_like(x)
        out[:-1] = 2 * x[:-1]
        return out, right(x)[1]

    assert records(rival("lazy", lazy), policies=("graph",))["lazy", "graph"].status == "wrong"


def test_out_of_memory_is_a_row_and_the_others_go_on():
    def greedy(x):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
        return right(x)

    found = records(rival("greedy", greedy), rival("ok", right), policies=("graph",))
    assert found["greedy", "graph"].status == "unsupported" and "out of memory" in found["greedy", "graph"].reason
    assert found["ok", "graph"].status == "ok"


def test_the_peak_counts_what_lives_at_the_same_time():
    x = torch.zeros(1 << 20, device="cuda")
    for fn, peak in ((lambda: x + 1, 4 << 20), (lambda: (x + 1) + 1, 8 << 20), (lambda: x.add_(1), 0)):
        assert peak_memory(fn, "cuda") == peak


@pytest.mark.parametrize("op", operators())
def test_every_rival_of_every_operator_passes_the_gate_or_says_why_not(op, device):
    mine = [w for build in presets().values() for w in build() if w.op == op and not w.unsupported]
    w = min(mine, key=lambda w: operators()[op].work(w).nbytes)
    found = list(run([w], operators=[operators()[op]], device="cuda", rounds=3))
    wrong = WRONG.get(op, set())
    bad = [r for r in found if r.status in ("wrong", "refused", "failed")]
    assert not [(r.backend, r.policy, r.reason) for r in bad if r.backend not in wrong]
    assert {r.backend for r in bad} == wrong and all(r.status == "wrong" and r.rel_error > 0.1 for r in bad)
    # A step that autograd runs is not for a graph.
    eager = {r.name for r in operators()[op].rivals if not r.graph}
    ours = {r.status for r in found if r.backend == "expertile" and not (r.policy == "graph" and r.backend in eager)}
    # `diagnose` compares torch's own calls.
    assert ours == ({"ok"} if not op.startswith("diagnose_") else set())


def test_verify_races_as_a_user_would(tmp_path):
    """On one problem: records of `auto` and of backend="measure", each with a time of its own choice."""
    path, first = tmp_path / "auto.jsonl", (ragged_m("first", "t", (40, 0, 260), 512, 256, "bf16"),)
    found = verify(1, path, 1.0, workloads=iter(first))
    assert found == read(path)
    taken = {r.backend: r for r in found if r.backend in ("auto", "measure")}
    assert sorted(taken) == ["auto", "measure"]
    for record in taken.values():
        like = [r for r in found if r.backend == record.config["backend"] and record.value == r.value]
        assert record.status == "ok" and like
    assert 0.5 < verdicts(found, "measure")[0].share <= 1.0
