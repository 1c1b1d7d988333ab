"""Peak memory: counted where it is known, stored and read back, failures told."""

import json

import pytest
import torch

from expertile.lab.measure.env import Env
from expertile.lab.race.memory import (
    MemoryCase,
    MemoryRecord,
    measure_memory,
    memory_path,
    peak_memory,
    read_memory,
    shipped_memory,
)
from expertile.lab.race.record import append, record_files

CPU = torch.device("cpu")
MB = 1 << 20


def record(peak=1000, **changes):
    values = {
        "op": "attention",
        "workload": "attention/1k",
        "shape": {"length": 1024},
        "dtype": "bf16",
        "backend": "expertile",
        "peak_nbytes": peak,
        "formula_nbytes": 900.0,
        "reason": "",
        "env": Env("NVIDIA H200"),
        "run": "r",
        "date": "2026-11-21",
    }
    return MemoryRecord(**values | changes)


@pytest.mark.parametrize(
    ("fn", "peak"),
    [
        (lambda x: x + 1, 4 * MB),
        (lambda x: (x + 1) + 1, 8 * MB),  # the first sum lives until the second is there
        (lambda x: ((x + 1).sum(), x * 2)[1], 4 * MB),  # it is gone before the product
        (lambda x: x.add_(1), 0),
    ],
)
def test_the_peak_counts_what_lives_at_the_same_time(fn, peak):
    x = torch.zeros(MB)
    assert peak <= peak_memory(lambda: fn(x), CPU) <= peak + 4096


def test_the_profiler_is_not_heard(capfd):
    peak_memory(lambda: torch.zeros(8), CPU)
    assert capfd.readouterr() == ("", "")


def test_cases_become_records_as_they_are_measured(tmp_path):
    path = memory_path(tmp_path / "2026-11-21-toy.jsonl")
    assert path.name == "2026-11-21-toy-memory.jsonl"
    calls = []

    def prepare():
        x = torch.zeros(MB)
        return lambda: calls.append(1) or x + 1

    def too_much():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TB")

    cases = [
        MemoryCase("add", "toy/1", {"n": MB}, "fp32", "torch", prepare, 4.0 * MB),
        MemoryCase("add", "toy/1", {"n": MB}, "fp32", "greedy", too_much),
    ]
    good, bad = measure_memory(cases, CPU, path)
    assert len(calls) == 2  # the first call does not count
    assert 4 * MB <= good.peak_nbytes <= 4 * MB + 4096 and good.reason == ""
    assert bad.peak_nbytes is None and bad.reason.startswith("out of memory: ")
    assert read_memory(path) == [good, bad] and good.run == bad.run
    assert good.env.torch == torch.__version__


def test_records_survive_a_round_trip_and_are_no_records_of_times(tmp_path):
    files = tmp_path / "nvidia-h200"
    append(files / "2026-11-20-attention-memory.jsonl", record(1))
    append(files / "2026-11-21-attention-memory.jsonl", record(2), record(None, reason="out of memory"))
    assert MemoryRecord.from_json(record().to_json()) == record()
    assert [r.peak_nbytes for r in shipped_memory("attention", root=tmp_path)] == [2, None]
    assert shipped_memory("attention", "nvidia-a100", tmp_path) == ()
    assert record_files(tmp_path) == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"op": ""}, "op: expected a non-empty string, got ''"),
        ({"shape": [1]}, "shape: expected an object"),
        ({"peak": -1}, "peak_nbytes: expected a number of bytes, 0 or more, or null; got -1"),
        ({"formula_nbytes": "many"}, "formula_nbytes: expected a number of bytes"),
        ({"peak": None}, "reason: expected one where there is no peak_nbytes, and only there, got ''"),
        ({"reason": "why"}, "reason: expected one where there is no peak_nbytes, and only there, got 'why'"),
    ],
)
def test_impossible_records_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        record(**change)


def test_a_line_that_is_none_is_named(tmp_path):
    path = tmp_path / "x-memory.jsonl"
    data = json.loads(record().to_json())
    del data["peak_nbytes"]
    path.write_text(json.dumps(data) + "\n")
    with pytest.raises(ValueError, match=r"x-memory\.jsonl:1: peak_nbytes: missing key"):
        read_memory(path)
