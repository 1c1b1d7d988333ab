"""Records of counted traffic: through JSON and back, and what stands in them where nothing can be counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from expertile.lab.measure.env import Env
from expertile.lab.race.record import record_files
from expertile.lab.traffic import formulas
from expertile.lab.traffic.child import decode, encode
from expertile.lab.traffic.measured import (
    NO_GPU,
    TrafficRecord,
    collect,
    measure,
    read_traffic,
    shipped_traffic,
    traffic_path,
)
from expertile.lab.traffic.ncu import Kernel, Profile
from tests.lab.traffic.test_formulas import H200, subject

ENV = Env("NVIDIA H200")
SOFTMAX = subject("softmax_backward", rows=64, cols=4096)
WAYS = formulas()["softmax_backward"].ways(SOFTMAX, H200)


def two_kernels(child):
    return Profile((Kernel("a", 10.0, 20.0, 30.0, 40.0, 1e-6), Kernel("b", 1.0, 2.0, 3.0, None, 2e-6)))


def test_a_record_sums_its_kernels_and_keeps_the_formula():
    records = list(measure(SOFTMAX, WAYS, ENV, "run", two_kernels, has_gpu=True))
    assert [r.way for r in records] == ["unfused", "torch", "expertile"]
    found = records[1]
    assert (found.read, found.written, found.l2_read, found.launches) == (11.0, 22.0, 33.0, 2)
    assert found.l2_written is None, "a figure that one kernel lacks cannot be summed"
    assert found.time_s == pytest.approx(3e-6)
    assert (found.model_read, found.model_written) == (WAYS[1].read, WAYS[1].written)
    assert found.kernels == (("a", 10.0, 20.0), ("b", 1.0, 2.0))


def test_the_child_is_told_subject_and_way():
    asked = []
    list(measure(SOFTMAX, WAYS, ENV, "run", lambda child: asked.append(child) or two_kernels(child), has_gpu=True))
    assert [child[2] for child in asked] == ["unfused", "torch", "expertile"]
    assert all(decode(child[1]) == SOFTMAX for child in asked)


def test_subjects_survive_the_command_line():
    for op in formulas():
        assert decode(encode(subject(op))) == subject(op)
    grouped = replace(SOFTMAX, op="grouped_mm", dims=(("group_sizes", (1, 2)), ("k", 3), ("n", 4)))
    assert decode(encode(grouped)) == grouped


def test_without_a_gpu_nothing_is_started():
    def started(child):
        raise AssertionError("ncu was started")

    records = list(measure(SOFTMAX, WAYS, ENV, "run", started, has_gpu=False))
    assert len(records) == 3 and all(r.reason == NO_GPU and r.read is None for r in records)


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

    records = {r.way: r for r in measure(SOFTMAX, WAYS, ENV, "run", fails_once, has_gpu=True)}
    assert records["torch"].reason and records["expertile"].read == 11.0


def test_files(tmp_path):
    path = traffic_path("nvidia-h200", "2026-11-21T10:00:00Z", tmp_path)
    assert path == tmp_path / "nvidia-h200" / "traffic" / "2026-11-21.jsonl"
    assert shipped_traffic("nvidia-h200", tmp_path) == ()
    counted = collect([(SOFTMAX, WAYS)], path, two_kernels)
    records = read_traffic(path)
    assert len(records) == 3 and counted == sum(bool(r.kernels) for r in records)
    assert shipped_traffic("nvidia-h200", tmp_path) == tuple(records)
    assert record_files(tmp_path) == (), "a file of traffic must not be taken for one of times"


def test_json_round_trip_and_errors():
    (record, *_) = measure(SOFTMAX, WAYS, ENV, "run", two_kernels, has_gpu=True)
    assert TrafficRecord.from_json(record.to_json()) == record
    with pytest.raises(ValueError, match="reason: expected one where no kernel was counted"):
        replace(record, kernels=())
    with pytest.raises(ValueError, match="reason"):
        replace(record, reason="but it was")
    with pytest.raises(ValueError, match="way: expected a non-empty string"):
        replace(record, way="")
    with pytest.raises(ValueError, match="expected one JSON object"):
        TrafficRecord.from_json("[]")
