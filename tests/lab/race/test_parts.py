"""Files of parts: on the disk at once, each figure once, gone on with on the same machine alone; what has no time."""

import json
from dataclasses import replace

import pytest

from expertile.device import Device
from expertile.lab.measure.clocks import Clocks
from expertile.lab.measure.interleaved import Failure, Measurement
from expertile.lab.race.parts import PartsFile, TimeLimit, figures, newest_parts, read_parts

CPU = Device.current("cpu")


def opened(path, device=CPU, **versions):
    return PartsFile(path, device, ("size", "T"), **versions)


def test_every_part_is_on_the_disk_at_once_and_a_later_one_takes_its_place(tmp_path):
    path = tmp_path / "new" / "x.jsonl"
    file = opened(path)
    assert [part["part"] for part in read_parts(path)] == ["run"]
    file.put({"part": "sizes", "T": 1, "fwd": 1.0, "unfinished": True})
    file.put({"part": "stages", "size": [1, 2], "seconds": {}})
    file.put({"part": "sizes", "T": 2, "fwd": 2.0})
    file.put({"part": "sizes", "T": 1, "fwd": 3.0})
    _, *parts = read_parts(path)
    assert [(p["part"], p.get("fwd")) for p in parts] == [("sizes", 3.0), ("stages", None), ("sizes", 2.0)]
    assert {p["run"] for p in read_parts(path)} == {file.run}
    assert [p.name for p in path.parent.iterdir()] == ["x.jsonl"]


def test_a_file_is_gone_on_with(tmp_path):
    path = tmp_path / "x.jsonl"
    first = opened(path)
    first.put({"part": "sizes", "T": 1})
    first.put({"part": "failed", "of": "sizes", "T": 2, "reason": "no memory"})
    first.put({"part": "sizes", "T": 3, "unfinished": True})
    second = opened(path)
    assert [second.has({"part": "sizes", "T": t}) for t in (1, 2, 3, 4)] == [True, False, False, False]
    assert not second.has({"part": "stages", "T": 1})
    second.put({"part": "sizes", "T": 2})
    parts = read_parts(path)
    assert [p["part"] for p in parts] == ["run", "sizes", "sizes", "sizes", "run"]
    assert [p["run"] for p in parts] == [first.run, first.run, second.run, first.run, second.run]


def test_another_machine_or_version_is_refused(tmp_path):
    path = tmp_path / "x.jsonl"
    opened(path, transformers="5.17")
    before = path.read_text()
    with pytest.raises(ValueError, match="5.23.*got one made with.*5.17"):
        opened(path, transformers="5.23")
    with pytest.raises(ValueError, match="another chip"):
        opened(path, replace(CPU, name="another chip"), transformers="5.17")
    assert path.read_text() == before


def test_newest_and_malformed_files(tmp_path):
    assert newest_parts(tmp_path) is None
    for name in ("2026-01-02.jsonl", "2026-01-10.jsonl", "notes.jsonl"):
        (tmp_path / name).write_text(json.dumps({"gpu": "x"}))
    assert newest_parts(tmp_path) == tmp_path / "2026-01-10.jsonl"
    with pytest.raises(ValueError, match='2026-01-10.jsonl:1: expected an object with a "part"'):
        read_parts(tmp_path / "2026-01-10.jsonl")


def test_time_runs_out():
    times = iter([10.0, 12.5, 16.0])
    limit = TimeLimit(5.0, now=lambda: next(times))
    assert (limit.left, limit.left) == (2.5, -1.0)


def test_figures_are_seconds_or_reasons():
    right = Measurement(2.0, (1.5, 2.5), (2.0,), 1, Clocks(1500.0))
    found = figures({"a": right, "b": replace(right, bound_s=3.0), "c": Failure("memory", "out of memory")})
    assert found["seconds"]["a"] == 2.0 and found["ci95_s"] == {"a": [1.5, 2.5]}
    assert "below the bound" in found["seconds"]["b"] and found["seconds"]["c"] == "out of memory"
    assert found["sm_clock_mhz"] == {"a": 1500.0}
