"""Which backends may be timed, and what each is told about the group sizes."""

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from expertile.device import Device
from expertile.lab.operators.grouped_mm import grouped_mm, with_config
from expertile.lab.race.case import Candidate, Case, Site
from expertile.lab.race.operator import Verdict
from expertile.lab.race.workloads import ragged_m
from expertile.ops.backend import NoConfig
from expertile.ops.grouped_mm.backend import Backend
from expertile.roofline import Work

CPU = torch.device("cpu")
WORKLOAD = ragged_m("w", "t", (8, 0, 5), 32, 16, "bf16")
SITE = Site(Device.current("cpu"), CPU)


def backend(run, reads_offs_on_host=False, supports=lambda p, d: None):
    return Backend("b", "for a test", run, supports, reads_offs_on_host=reads_offs_on_host)


def gated(one):
    """The one candidate that `one` becomes."""
    (found,) = Case(WORKLOAD, SITE, grouped_mm([one])).candidates({"b"}, 0)
    return found


def right(problem, operands, config, out):
    product = torch.nn.functional.grouped_mm(operands.a, operands.b, offs=operands.offs)
    if out is None:
        return product
    end = int(operands.offs[-1])
    out[:end] = product[:end]
    return out


def test_the_gate_has_rows_past_the_end_and_the_timed_inputs_have_none():
    operator = grouped_mm(())
    assert operator.gate_inputs(WORKLOAD, CPU, 0)[0].shape == (13 + 64, 32)
    assert operator.make_inputs(WORKLOAD, CPU, 0)[0].shape == (13, 32)
    assert operator.work(WORKLOAD) == WORKLOAD.problem("cpu").work(WORKLOAD.group_sizes)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize(
    ("device", "host", "policy", "known"),
    [
        ("cpu", False, "eager", True),
        ("cuda", False, "graph", False),
        ("cuda", False, "eager", False),
        ("cuda", True, "graph", True),
        ("cuda", True, "eager", False),
    ],
)
def test_group_sizes_are_given_only_where_they_would_be_known(device, host, policy, known):
    seen = []

    def run(problem, operands, config, out):
        seen.append(problem.group_sizes)
        return operands.a

    rival = with_config(backend(run, host), NoConfig())
    bind = rival.bind_on_host if policy == "graph" and rival.bind_on_host else rival.bind
    inputs = grouped_mm(()).make_inputs(WORKLOAD, CPU, 0)
    if device == "cuda":
        with FakeTensorMode():
            inputs = tuple(torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x in inputs)
    bind(WORKLOAD, inputs)()
    assert seen == [(8, 0, 5) if known else None]


@pytest.mark.parametrize(("host", "known"), [(False, None), (True, (8, 0, 5))])
def test_on_a_gpu_only_a_backend_that_reads_sizes_is_asked_with_them(host, known):
    seen = []

    def supports(problem, device):
        seen.append(problem.group_sizes)
        return "no"

    (rival,) = grouped_mm([backend(right, host, supports)]).rivals
    assert rival.supports(WORKLOAD, Device.by_name("h200")) == "no" and seen == [known]


def test_a_config_says_when_sizes_were_given():
    candidate = Candidate("b", Work(1, 1), {"block_m": 64}, sizes_on_host=True)
    assert candidate.shown_config("graph") == {"block_m": 64, "sizes": "host"}
    assert candidate.shown_config("eager") == {"block_m": 64}


def test_a_right_backend_is_bound_to_operands():
    found = gated(backend(right))
    assert found.status == "ok" and found.verdict.rel_error < 2**-8
    a, b, offs = inputs = grouped_mm(()).make_inputs(WORKLOAD, CPU, 0)
    (out,) = found.bind(inputs, "eager")()
    assert torch.equal(out, torch.nn.functional.grouped_mm(a, b, offs=offs))


def test_overwriting_past_the_end_is_wrong():
    def greedy(problem, operands, config, out):
        product = right(problem, operands, config, None)
        product[13:] = 1.0  # fresh memory may hold the very poison that is looked for
        return product if out is None else out.copy_(product)

    found = gated(backend(greedy))
    assert found.status == "wrong" and "past offs[-1]" in found.reason and found.bind is None


def test_changing_the_operands_is_wrong():
    def late(problem, operands, config, out):
        product = right(problem, operands, config, out)
        if out is None:
            operands.a.zero_()
        return product

    found = gated(backend(late))
    assert (found.status, found.reason) == ("wrong", "changes its inputs")


def test_every_config_is_tried_where_that_is_asked_for_and_the_first_is_right():
    several = replace(backend(right), configs=lambda p, d: (NoConfig(), NoConfig()))
    for all_configs, count in ((False, 1), (True, 2)):
        case = Case(WORKLOAD, SITE, grouped_mm([several]), all_configs=all_configs)
        assert [c.status for c in case.candidates({"b"}, 0)] == ["ok"] * count
    case = Case(WORKLOAD, SITE, grouped_mm([replace(several, run=raising)]), all_configs=True)
    assert [c.status for c in case.candidates({"b"}, 0)] == ["failed"]


def raising(problem, operands, config, out):
    raise RuntimeError("tile out of range")


def test_supports_that_raises_is_a_reason():
    def broken(problem, device):
        raise KeyError("n")

    found = gated(backend(right, supports=broken))
    assert found.status == "failed" and "KeyError" in found.reason


def test_candidates_that_gave_a_result_are_wrong_and_others_failed():
    inf = float("inf")
    plain = Candidate("c", Work(1, 1))
    wrong = plain.judged(Verdict(False, 0.5, 1.0, "relative error"))
    assert (wrong.status, wrong.reason, wrong.bind) == ("wrong", "relative error", None)
    unwritten = plain.judged(Verdict(False, inf, inf, "never written"))
    assert unwritten.status == "wrong"
    hung = plain.judged(Verdict(False, inf, inf, "hangs", checked=0.0))
    assert (hung.status, hung.reason) == ("failed", "hangs")
