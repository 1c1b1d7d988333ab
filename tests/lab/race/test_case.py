"""An operator in a whole run: every outcome is a record, `copy` stands beside, and runs resume."""

import time
from dataclasses import replace

import pytest
import torch

from expertile.device import Device
from expertile.lab.bench import run as run_module
from expertile.lab.bench.run import run
from expertile.lab.race import case as case_module
from expertile.lab.race import timing
from expertile.lab.race.baselines import Copy
from expertile.lab.race.case import Case, Site
from expertile.lab.race.record import read
from expertile.lab.race.workloads import ragged_m
from expertile.ops.grouped_mm.backends import by_name
from expertile.roofline import Bound
from tests.lab.operators.toy import operator, raises, right, rival, workload

W = workload()


def records(*rivals, workloads=(W,), **options):
    options = {"seconds": 0.2, "device": "cpu", "seed": 3, **options}
    return list(run(workloads, operators=[operator(*rivals)], **options))


def by_backend(found):
    return {r.backend: r for r in found}


def out_of_memory(x):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99.00 GiB")


def test_every_outcome_is_a_record():
    found = by_backend(
        records(
            rival("expertile", right),
            rival("wrong", lambda x: (3 * x, x.sum(1))),
            rival("broken", raises),
            rival("big", out_of_memory),
            rival("picky", right, supports=lambda w, device: f"needs CUDA, this is a {device.kind}"),
            rival("careless", right, supports=lambda w, device: w["depth"]),
        )
    )
    assert list(found) == ["expertile", "wrong", "broken", "big", "picky", "careless", "copy"]
    good = found["expertile"]
    assert (good.status, good.policy, good.op, good.workload) == ("ok", "eager", "double", "toy/24x40-fp32")
    assert good.shape == {"rows": 24, "cols": 40} and good.config == {}
    assert good.ci95_s[0] <= good.time_s <= good.ci95_s[1]
    assert (good.flops, good.nbytes) == (2 * 24 * 40, 2 * 24 * 40 * 4 + 24 * 4)
    assert 0 < good.rel_error < 1e-6 and 0 < good.max_error < 1e-6
    assert found["wrong"].status == "wrong" and found["wrong"].rel_error == pytest.approx(0.5, rel=1e-3)
    assert (found["broken"].status, found["broken"].reason) == (
        "failed",
        "in the gate: RuntimeError: tile out of range",
    )
    assert found["big"].status == "unsupported" and "out of memory" in found["big"].reason
    assert (found["picky"].status, found["picky"].reason) == ("unsupported", "needs CUDA, this is a cpu")
    assert found["careless"].status == "failed" and "KeyError" in found["careless"].reason
    copy = found["copy"]
    assert copy.status == "ok" and copy.flops == 0 and good.nbytes <= copy.nbytes < good.nbytes + 8


def _late(source, out):
    time.sleep(0.01)
    return out.copy_(source)


@pytest.mark.parametrize(
    ("ways", "best"),
    [
        ({"slow": _late, "fast": lambda source, out: out.copy_(source)}, "fast"),
        ({"fast": lambda source, out: out.copy_(source), "slow": _late}, "fast"),
        ({"wrong": lambda source, out: out, "right": _late}, "right"),
        ({"raises": lambda source, out: raises(source), "right": _late}, "right"),
    ],
)
def test_copy_is_the_fastest_way_that_is_right(ways, best, monkeypatch):
    monkeypatch.setattr(case_module, "COPIES", tuple(Copy(way, move) for way, move in ways.items()))
    ours, copy = records(rival("expertile", right))
    assert (ours.backend, copy.backend, copy.status, copy.config) == ("expertile", "copy", "ok", {"way": best})
    assert (copy.time_s < 0.01) == (best == "fast")


def test_where_no_way_to_copy_is_right_the_record_says_so(monkeypatch):
    wrong = tuple(Copy(way, lambda source, out: out) for way in ("one", "two"))
    monkeypatch.setattr(case_module, "COPIES", wrong)
    _, copy = records(rival("expertile", right))
    assert (copy.status, copy.config, copy.time_s) == ("wrong", {"way": "one"}, None)


def test_grouped_products_and_operators_share_a_run():
    product = ragged_m("small", "test", (12, 20), 32, 24, "fp32")
    found = records(rival("expertile", right), workloads=(product, W), backends=[by_name("loop")])
    assert [(r.op, r.backend) for r in found] == [
        ("grouped_mm", "loop"),
        ("grouped_mm", "dense"),
        ("grouped_mm", "copy"),
        ("double", "expertile"),
        ("double", "copy"),
    ]
    assert all(r.status == "ok" for r in found) and len({r.run for r in found}) == 1


def test_a_run_of_an_operator_resumes(tmp_path):
    path = tmp_path / "out.jsonl"
    both = (W, workload(8, 8, "bf16"))
    stream = run(both, operators=[operator(rival("a", right), rival("b", right))], out_path=path, device="cpu")
    first = next(stream)
    stream.close()
    rest = records(rival("a", right), rival("b", right), workloads=both, out_path=path, resume=True)
    assert {r.run for r in rest} == {first.run} and len(read(path)) == 6
    keys = [(r.workload, r.backend) for r in read(path)]
    assert len(set(keys)) == 6


def test_namesakes_of_two_operators_are_not_taken_for_each_other(tmp_path):
    path = tmp_path / "out.jsonl"
    records(rival("a", right), out_path=path)
    triple = replace(operator(rival("a", right)), name="other")
    rest = list(run([workload(op="other")], operators=[triple], device="cpu", seconds=0.2, out_path=path, resume=True))
    assert [(r.op, r.backend, r.status) for r in rest] == [("other", "a", "ok"), ("other", "copy", "ok")]


def test_a_time_below_the_bound_is_refused(monkeypatch):
    monkeypatch.setattr(run_module, "bound", lambda work, device, key: Bound(10.0, "memory"))
    found = by_backend(records(rival("a", right)))
    assert found["a"].status == "refused" and "below the bound" in found["a"].reason


def test_inputs_rotate_and_outputs_live_until_their_set_comes_round():
    seen = set()

    def bind(w, inputs):
        seen.add(inputs[0].data_ptr())
        return lambda: right(inputs[0])

    records(rival("a", right, bind=bind), workloads=(workload(256, 256),))
    assert len(seen) > 2


def test_a_rival_that_no_graph_can_hold_is_timed_eagerly_alone(monkeypatch):
    # On a CPU there is one policy: both are timed by it.
    real = timing.time_interleaved
    monkeypatch.setattr(timing, "time_interleaved", lambda calls, **how: real(calls, **how | {"policy": "eager"}))
    settings = run_module._Session.__init__

    def with_graph(self, **fields):
        settings(self, **fields | {"policies": ("graph", "eager")})

    monkeypatch.setattr(run_module._Session, "__init__", with_graph)
    found = {(r.backend, r.policy): r for r in records(rival("a", right), rival("syncs", right, graph=False))}
    assert found["a", "graph"].status == found["a", "eager"].status == found["syncs", "eager"].status == "ok"
    refused = found["syncs", "graph"]
    assert (refused.status, refused.reason) == ("unsupported", "not measured: it cannot be captured in a CUDA graph")


def test_a_rival_that_is_not_to_be_timed_is_not_gated(monkeypatch):
    site = Site(Device.current("cpu"), torch.device("cpu"))
    found = {}
    for policies in (("graph",), ("graph", "eager")):
        case = Case(W, site, operator(rival("a", right), rival("syncs", raises, graph=False)), policies)
        found[policies] = {c.name: c.status for c in case.candidates(("a", "syncs"), seed=1)}
    assert found["graph",] == {"a": "ok", "syncs": "ok"} and found["graph", "eager"]["syncs"] == "failed"


def test_workloads_and_operators_must_fit():
    with pytest.raises(ValueError, match=r"op: expected one of those given \(double\), got 'triple'"):
        records(rival("a", right), workloads=(workload(op="triple"),))


def test_candidates_need_a_grouped_product(tmp_path):
    (tmp_path / "mine.py").write_text("def fn(a, b, offs):\n    return a\n")
    with pytest.raises(ValueError, match="candidates: expected grouped products for them to compute, got double alone"):
        records(rival("a", right), candidates=[f"{tmp_path}/mine.py:fn"])


def test_listed_workloads_and_those_larger_than_memory_are_reasons(monkeypatch):
    (listed,) = records(rival("a", raises), workloads=(workload(unsupported="not on a Sunday"),))
    assert (listed.status, listed.reason, listed.backend) == ("unsupported", "not on a Sunday", "a")
    monkeypatch.setattr(run_module, "free_memory", lambda device: 1 << 10)
    (large,) = records(rival("a", right))
    assert large.status == "unsupported" and "needs about" in large.reason


def test_a_backward_rival_does_its_forward_pass_in_bind():
    def bind(w, inputs):
        x = inputs[0].detach().requires_grad_()
        y = (x * x).sum()
        return lambda: (torch.autograd.grad(y, x, retain_graph=True)[0], right(inputs[0])[1])

    (found, _) = records(rival("torch", right, bind=bind))
    assert found.status == "ok" and found.time_s > 0
