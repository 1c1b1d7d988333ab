"""Candidates are loaded before anything is measured, and a grouped product knows who computes it."""

import pytest
import torch

from expertile.device import Device
from expertile.lab.bench.run import Event, run
from expertile.lab.operators.grouped_mm import grouped_mm
from expertile.lab.race.candidate_gate import UserCandidates
from expertile.lab.race.case import Case, Site
from expertile.lab.race.operator import record_name
from expertile.lab.race.workloads import ragged_m
from expertile.ops.grouped_mm.backends import by_name

CPU = torch.device("cpu")
SITE = Site(Device.current("cpu"), CPU)
PRODUCT = ragged_m("small", "test", (12, 0, 20), 32, 24, "fp32")


def _spec(folder, source, function="fn"):
    (folder / "mine.py").write_text(source)
    return f"{folder}/mine.py:{function}"


@pytest.mark.parametrize(
    ("source", "function", "message"),
    [
        (
            "import nothing_of_that_name\n",
            "fn",
            "candidate mine.py:fn cannot be loaded: importing mine.py failed at line 1: ModuleNotFoundError",
        ),
        (
            "def fn(a, b, offs):\n    return a\n",
            "gn",
            "candidate mine.py:gn cannot be loaded: mine.py has no 'gn'; its functions: fn",
        ),
        ("def fn(x):\n    return x\n", "fn", r"candidate mine.py:fn cannot be loaded: expected fn\(a, b, offs\)"),
        ("import os\nos._exit(3)\n", "fn", "candidate mine.py:fn cannot be loaded: crashes: .* exited with code 3"),
    ],
)
def test_an_unloadable_candidate_ends_the_run_before_the_first_workload(tmp_path, source, function, message):
    events: list[Event] = []
    path = tmp_path / "out.jsonl"
    stream = run(
        [PRODUCT],
        [by_name("loop")],
        candidates=[_spec(tmp_path, source, function)],
        device="cpu",
        out_path=path,
        on_event=events.append,
    )
    with pytest.raises(ValueError, match=message):
        next(stream)
    assert [e.kind for e in events] == ["start"] and not path.exists()


def test_a_candidate_that_hangs_while_it_is_loaded_is_not_waited_for(tmp_path):
    spec = _spec(tmp_path, "import time\ntime.sleep(1000)\ndef fn(a, b, offs): ...\n")
    with pytest.raises(ValueError, match="mine.py:fn cannot be loaded: hangs: no result after 6 s"):
        UserCandidates([spec], CPU, 6.0).__enter__()


def test_two_candidates_of_one_name_are_refused(tmp_path):
    specs = []
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        specs.append(_spec(tmp_path / name, "def fn(a, b, offs): ...\n"))
    with pytest.raises(ValueError, match="a name of its own for each, got mine.py:fn of two folders"):
        UserCandidates(specs, CPU)
    assert len(UserCandidates([specs[0], specs[0]], CPU).gates) == 1


def test_loaded_candidates_are_known_after_they_passed(tmp_path):
    spec = _spec(tmp_path, "import torch\ndef fn(a, b, offs):\n    return torch._grouped_mm(a, b, offs=offs)\n")
    with UserCandidates([spec], CPU, 60.0) as candidates:
        (gate,) = candidates.gates.values()
        assert gate.backend is None
        assert gate.check(PRODUCT, 1).ok
        assert gate.backend.name == "mine.py:fn"


def test_a_case_of_a_grouped_product():
    case = Case(PRODUCT, SITE, grouped_mm([by_name("loop")]))
    assert case.names == ("loop", "dense", "copy") and case.dtype_key == "fp32"
    assert case.work == PRODUCT.problem("cpu").work(PRODUCT.group_sizes)
    assert case.memory_needed > PRODUCT.memory_nbytes
    assert [c.name for c in case.candidates({"loop", "copy"}, 1)] == ["loop", "copy", "copy"]
    assert len(case.input_sets(1)) * PRODUCT.memory_nbytes > SITE.device.l2_bytes or len(case.input_sets(1)) == 128
    assert record_name(PRODUCT) == "test/small"
