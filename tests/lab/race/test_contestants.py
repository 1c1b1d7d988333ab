"""Who may be timed, and what each is told about the group sizes."""

from dataclasses import replace

import pytest
import torch

from expertile.device import Device
from expertile.lab.race.contestants import Contestant, backend_contestants, candidate_contestant, make_bench
from expertile.lab.race.gate import Gate
from expertile.lab.race.workloads import ragged_m
from expertile.ops.backend import NoConfig
from expertile.ops.grouped_mm.backend import Backend
from expertile.roofline import Work

CPU = torch.device("cpu")
WORKLOAD = ragged_m("w", "t", (8, 0, 5), 32, 16, "bf16")


@pytest.fixture(scope="module")
def bench():
    return make_bench(WORKLOAD, Device.current("cpu"), CPU, 0)


def backend(run, reads_offs_on_host=False, supports=lambda p, d: None):
    return Backend("b", "for a test", supports, lambda p, d: (NoConfig(),), run, reads_offs_on_host)


def right(problem, operands, config, out):
    product = torch.nn.functional.grouped_mm(operands.a, operands.b, offs=operands.offs)
    if out is None:
        return product
    end = int(operands.offs[-1])
    out[:end] = product[:end]
    return out


def test_the_gate_has_rows_past_the_end_and_the_timed_problem_has_none(bench):
    assert bench.gate_problem.m == 13 + 64 and bench.problem.m == 13
    assert bench.work == WORKLOAD.problem("cpu").work(WORKLOAD.group_sizes)


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
def test_group_sizes_are_given_only_where_they_would_be_known(bench, device, host, policy, known):
    there = replace(bench, torch_device=torch.device(device))
    problem = there.known_to(backend(right, host), bench.problem, policy)
    assert problem.group_sizes == ((8, 0, 5) if known else None)


def test_a_config_says_when_sizes_were_given():
    contestant = Contestant("b", Work(1, 1), {"block_m": 64}, host_sizes=True)
    assert contestant.shown_config("graph") == {"block_m": 64, "sizes": "host"}
    assert contestant.shown_config("eager") == {"block_m": 64}


def test_a_right_backend_is_bound_to_operands(bench):
    (found,) = backend_contestants(bench, backend(right))
    assert found.status == "ok" and found.rel_error < 2**-8
    out = found.bind(bench.operands, "eager")()
    assert torch.equal(out[:13], right(None, bench.operands, None, None)[:13])


def test_overwriting_past_the_end_is_wrong(bench):
    def greedy(problem, operands, config, out):
        product = right(problem, operands, config, None)
        product[13:] = 1.0  # fresh memory may hold the very poison that is looked for
        return product if out is None else out.copy_(product)

    (found,) = backend_contestants(bench, backend(greedy))
    assert found.status == "wrong" and "past offs[-1]" in found.reason and found.bind is None


def test_supports_that_raises_is_a_reason(bench):
    def broken(problem, device):
        raise KeyError("n")

    (found,) = backend_contestants(bench, backend(right, supports=broken))
    assert found.status == "failed" and "KeyError" in found.reason


def test_candidates_that_gave_a_result_are_wrong_and_others_failed(bench):
    wrong = candidate_contestant(bench, None, "c", Gate(False, 0.5, 1.0, "relative error"))
    assert (wrong.status, wrong.rel_error) == ("wrong", 0.5)
    inf = float("inf")
    unwritten = candidate_contestant(bench, None, "c", Gate(False, inf, inf, "never written"))
    assert (unwritten.status, unwritten.rel_error) == ("wrong", None)
    hung = candidate_contestant(bench, None, "c", Gate(False, inf, inf, "hangs", checked=0.0))
    assert (hung.status, hung.reason) == ("failed", "hangs")
