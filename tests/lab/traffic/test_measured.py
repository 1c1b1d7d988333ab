"""Records of counted traffic: through JSON and back, and what stands in them where nothing can be counted."""

import pytest

from expertile.lab.measure.env import Env
from expertile.lab.race.record import MOVED_BYTES, Record
from expertile.lab.traffic import call, formulas
from expertile.lab.traffic.measured import NO_GPU, measure
from expertile.lab.traffic.ncu import Kernel, Profile
from expertile.lab.traffic.runs import decode, encode
from tests.lab.traffic.test_formulas import H200, subject

ENV = Env("NVIDIA H200")
SOFTMAX = subject("softmax_backward", rows=64, cols=4096)
WAYS = formulas()["softmax_backward"].ways(SOFTMAX, H200)


def two_kernels(child):
    return Profile((Kernel("a", 10.0, 20.0, 30.0, 40.0, 1e-6), Kernel("b", 1.0, 2.0, 3.0, None, 2e-6)))


def test_a_record_sums_its_kernels_and_keeps_the_formula():
    records = list(measure(SOFTMAX, WAYS, ENV, "run", two_kernels, has_gpu=True))
    assert [r.backend for r in records] == ["unfused", "torch", "expertile"]
    found = records[1]
    assert (found.metric, found.value, found.time_s) == (MOVED_BYTES, 33.0, None)
    seen = found.details
    assert [seen[key] for key in ("read", "written", "l2_read", "launches")] == [11.0, 22.0, 33.0, 2]
    assert seen["l2_written"] is None, "a figure that one kernel lacks cannot be summed"
    assert seen["time_s"] == pytest.approx(3e-6)
    assert (seen["model_read"], seen["model_written"]) == (WAYS[1].total.read, WAYS[1].total.written)
    assert seen["kernels"] == [["a", 10.0, 20.0], ["b", 1.0, 2.0]]
    assert Record.from_json(found.to_json()) == found


def test_the_child_is_told_subject_and_way():
    asked = []
    list(measure(SOFTMAX, WAYS, ENV, "run", lambda child: asked.append(child) or two_kernels(child), has_gpu=True))
    assert [child[2] for child in asked] == ["unfused", "torch", "expertile"]
    assert all(decode(child[1]) == SOFTMAX for child in asked)


def test_subjects_survive_the_command_line():
    for op in formulas():
        assert decode(encode(subject(op))) == subject(op)
    grouped = call("grouped_mm", (("group_sizes", (1, 2)), ("k", 3), ("n", 4)), "fp32")
    assert decode(encode(grouped)) == grouped


def test_without_a_gpu_nothing_is_started():
    def started(child):
        raise AssertionError("ncu was started")

    records = list(measure(SOFTMAX, WAYS, ENV, "run", started, has_gpu=False))
    assert len(records) == 3 and all(
        r.reason == NO_GPU and r.value is None and r.status == "unsupported" for r in records
    )


def test_a_refusal_is_not_asked_for_twice():
    asked = []

    def refuse(child):
        asked.append(child)
        return Profile((), "no (ERR_NVGPUCTRPERM)")

    records = list(measure(SOFTMAX, WAYS, ENV, "run", refuse, has_gpu=True))
    assert len(asked) == 1 and len(records) == 3 and all("ERR_NVGPUCTRPERM" in r.reason for r in records)


def test_one_way_that_fails_leaves_the_others():
    def fails_once(child):
        return Profile((), "the process failed: out of memory") if child[2] == "torch" else two_kernels(child)

    records = {r.backend: r for r in measure(SOFTMAX, WAYS, ENV, "run", fails_once, has_gpu=True)}
    assert records["torch"].reason and records["expertile"].value == 33.0
