"""Candidates are judged in their own process: right, wrong, crashing, hanging ones."""

import pytest
import torch

from expertile.lab.race.candidate_gate import CandidateGate
from expertile.lab.race.workloads import ragged_m

CPU = torch.device("cpu")
WORKLOAD = ragged_m("m", "t", (5, 0, 9), 64, 32, "bf16")

SOURCE = """
import ctypes, os, sys, time, torch
_calls = [0]
def good(a, b, offs):
    print("a candidate may print")
    return torch.nn.functional.grouped_mm(a, b, offs=offs)
def pairs(group_A, group_B):
    return [a @ b for a, b in zip(group_A, group_B)]
def wrong(a, b, offs):
    out = good(a, b, offs)
    out[3, 3] += 1
    return out
def unwritten(a, b, offs):
    out = good(a, b, offs)
    out[-1] = float("nan")
    return out
def raises(a, b, offs):
    raise RuntimeError("shared memory: 300 KB wanted, 227 KB there")
def segfault(a, b, offs):
    ctypes.string_at(0)
def exits(a, b, offs):
    sys.stderr.write("fatal: no licence\\n")
    os._exit(7)
def hangs(a, b, offs):
    time.sleep(1000)
def writes_inputs(a, b, offs):
    out = good(a, b, offs)
    a.zero_()
    return out
def remembers(a, b, offs):
    if _calls[0] == 0:
        _calls.append(good(a, b, offs))
    _calls[0] += 1
    return _calls[1]
def large_only(a, b, offs):
    if a.shape[0] < 20:
        os.abort()
    return good(a, b, offs)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("candidates") / "mine.py"
    path.write_text(SOURCE)
    return path


def verdict(source, function, timeout_s=60.0):
    with CandidateGate(f"{source}:{function}", CPU, timeout_s) as gate:
        return gate.check(WORKLOAD, 1)


@pytest.mark.parametrize("function", ["good", "pairs"])
def test_right_candidates_pass_with_their_errors(source, function):
    found = verdict(source, function)
    assert found.ok and found.reason == "" and found.checked == 1.0
    assert 0 < found.rel_error < 2**-8 and 0 < found.max_error < 2**-5


@pytest.mark.parametrize(
    ("function", "says", "checked"),
    [
        ("wrong", "error", 1.0),
        ("unwritten", "32 of 448 elements are NaN", 1.0),
        ("raises", "RuntimeError: shared memory: 300 KB wanted", 0.0),
        ("segfault", "crashes: its process was ended by SIGSEGV", 0.0),
        ("exits", "crashes: its process exited with code 7 (fatal: no licence)", 0.0),
        ("remembers", "error", 1.0),
        ("writes_inputs", "error", 1.0),
    ],
)
def test_faulty_candidates_are_told_why(source, function, says, checked):
    found = verdict(source, function)
    assert not found.ok and says in found.reason and (found.checked > 0) == (checked > 0)


def test_a_hang_ends_after_the_timeout(source):
    with CandidateGate(f"{source}:good", CPU, 60.0) as warm:
        assert warm.check(WORKLOAD, 1).ok
    found = verdict(source, "hangs", timeout_s=8.0)
    assert not found.ok and found.reason == "hangs: no result after 8 s" and found.checked == 0


def test_one_process_serves_many_workloads_and_is_replaced_when_it_dies(source):
    large = WORKLOAD.with_sizes((20, 0, 30), name="large")
    with CandidateGate(f"{source}:large_only", CPU, 60.0) as gate:
        assert gate.check(large, 1).ok
        first = gate._child.pid
        assert gate.check(large, 2).ok and gate._child.pid == first
        assert "SIGABRT" in gate.check(WORKLOAD, 3).reason
        assert gate.check(large, 4).ok and gate._child.pid != first


def test_a_file_that_cannot_be_imported_is_asked_once(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import nothing_of_that_name\n")
    with CandidateGate(f"{path}:fn", CPU, 60.0) as gate:
        first = gate.check(WORKLOAD, 1)
        assert not first.ok and "ModuleNotFoundError: No module named 'nothing_of_that_name'" in first.reason
        assert gate._child is None and gate.check(WORKLOAD, 2) == first and gate._child is None
