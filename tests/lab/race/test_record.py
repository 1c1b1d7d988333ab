"""Records: the keys of the format, no impossible figure, and files that survive an interruption."""

import json
import lzma
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertile.lab.measure.env import Env
from expertile.lab.race.record import (
    Record,
    append,
    read,
    results_path,
    shipped_files,
    shipped_records,
    shipped_root,
    shown_files,
)
from tests.lab.records import record_files, timed, untimed

KEYS = ["op", "workload", "shape", "dtype", "backend", "config", "policy", "metric", "value", "ci95", "bound"]
KEYS += ["limiter", "flops", "nbytes", "rel_error", "max_error", "status", "reason", "details", "env", "run", "date"]
ENV_KEYS = ["gpu", "driver", "torch", "triton", "expertile", "commit", "sm_clock_mhz", "power_w", "throttle"]

_text = st.text(min_size=1, max_size=20)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | _text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def _records(draw):
    time_s = draw(st.floats(1e-9, 1e3))
    spread = draw(st.floats(0, 0.9))
    changes = {
        "workload": draw(_text),
        "backend": draw(_text),
        "run": draw(_text),
        "reason": draw(_text),
        "shape": draw(st.dictionaries(_text, _json, max_size=3)),
        "config": draw(st.dictionaries(_text, _json, max_size=3)),
        "details": draw(st.dictionaries(_text, _json, max_size=3)),
        "policy": draw(st.sampled_from(("graph", "eager"))),
        "limiter": draw(st.sampled_from(("compute", "memory", "unknown"))),
        "flops": draw(st.floats(0, 1e18)),
        "nbytes": draw(st.floats(0, 1e13)),
        "bound": draw(st.floats(0, 1)) * time_s,
        "env": Env(
            draw(_text),
            power_w=draw(st.none() | st.floats(0, 2000)),
            throttle=draw(st.none() | st.text()),
            commit=draw(st.none() | st.just("0123abcd4567+dirty")),
        ),
    }
    status = draw(st.sampled_from(("ok", "wrong", "refused", "unsupported")))
    if status in ("ok", "refused"):
        return timed(time_s, spread, status=status, **changes)
    return untimed(status, time_s=time_s, spread=spread, **changes)


@given(_records())
@settings(max_examples=200, deadline=None)
def test_json_round_trip(record):
    line = record.to_json()
    assert "\n" not in line
    assert Record.from_json(line) == record
    data = json.loads(line)
    assert list(data) == KEYS and list(data["env"]) == ENV_KEYS


@given(st.lists(_records(), max_size=5))
@settings(max_examples=30, deadline=None)
def test_file_round_trip(tmp_path_factory, records):
    path = tmp_path_factory.mktemp("records") / "gpu" / "x.jsonl"
    append(path)
    for record in records:
        append(path, record)
    assert read(path) == records


def test_rates_follow_from_the_time():
    found = timed(0.5, flops=2e12, nbytes=4e9)
    assert (found.tflops, found.gbps) == (4.0, 8.0)
    assert untimed("failed").tflops is None and untimed("failed").gbps is None


def test_bytes_and_tokens_are_no_times():
    peak = timed(metric="peak_bytes", value=0, ci95=None, bound=0.0)
    assert peak.value == 0 and peak.time_s is peak.ci95_s is peak.tflops is None and peak.bound_s == 0
    rate = timed(metric="tokens/s", value=2e6, ci95=(1.9e6, 2.1e6), bound=3e6)
    assert rate.time_s is None and Record.from_json(rate.to_json()) == rate
    with pytest.raises(ValueError, match="value 4e\\+06 is better than bound 3e\\+06 \\(tokens/s\\)"):
        replace(rate, value=4e6)
    assert len({timed().key, peak.key, rate.key}) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "fast"}, "status: expected one of ok, wrong, refused, unsupported, failed, got 'fast'"),
        ({"policy": "both"}, "policy: expected one of graph, eager, got 'both'"),
        ({"limiter": "luck"}, "limiter: expected one of"),
        ({"op": ""}, "op: expected a non-empty string, got ''"),
        ({"shape": [1]}, r"shape: expected an object, got \[1\]"),
        ({"date": "yesterday"}, "date: expected an ISO 8601 date or time, got 'yesterday'"),
        ({"flops": math.inf}, "flops: expected a finite number of 0 or more, got inf"),
        ({"nbytes": -1}, "nbytes: expected a finite number of 0 or more, got -1"),
        ({"metric": "miles"}, "metric: expected one of seconds, peak_bytes, moved_bytes, tokens/s, got 'miles'"),
        ({"value": None}, "value: expected one for status 'ok', got None"),
        ({"value": 0.0}, "value: expected more than 0 seconds"),
        ({"value": math.nan}, "value: expected a finite number"),
        ({"ci95": (2.0, 1.0)}, r"ci95: expected lo <= hi, got \[2.0, 1.0\]"),
        ({"ci95": (1.0,)}, r"ci95: expected \[lo, hi\]"),
        ({"details": 3}, "details: expected an object, got 3"),
        ({"bound": 2e-3}, r"status: expected 'refused', since value 0\.001 is better than bound 0\.002"),
        ({"status": "wrong", "reason": "nan"}, "value: expected none for status 'wrong', got 0.001"),
        ({"status": "failed", "reason": "raises"}, "value: expected none for status 'failed', got 0.001"),
        ({"status": "refused"}, "reason: expected why the status is 'refused', got ''"),
        ({"max_error": -1.0}, "max_error: expected a finite number of 0 or more"),
        ({"reason": None}, "reason: expected a string"),
        ({"env": {}}, "env: expected an Env"),
    ],
)
def test_impossible_records_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(timed(), **change)


def test_no_value_no_interval():
    with pytest.raises(ValueError, match=r"ci95: expected none without a value, got \(1\.0, 2\.0\)"):
        replace(untimed("unsupported"), ci95=(1.0, 2.0))


def test_a_refused_time_may_be_kept():
    assert replace(timed(), bound=2e-3, status="refused", reason="below its bound").time_s == 1e-3


def test_errors_that_are_not_finite_become_null():
    record = replace(untimed("wrong", "result has NaN"), rel_error=math.nan, max_error=math.inf)
    assert (record.rel_error, record.max_error) == (None, None)
    assert Record.from_json(record.to_json()) == record


def test_bad_env():
    with pytest.raises(ValueError, match=r"env\.gpu: expected a non-empty string"):
        Env("")
    with pytest.raises(ValueError, match=r"env\.torch: expected a string or null, got 2"):
        Env("cpu", torch=2)
    with pytest.raises(ValueError, match=r"env\.power_w: expected a finite number"):
        Env("cpu", power_w=-3.0)


def test_records_of_before_expertile_named_its_commit_are_read():
    data = json.loads(timed().to_json())
    del data["env"]["commit"]
    found = Record.from_json(json.dumps(data))
    assert found.env == replace(timed().env, commit=None)


def _without(key):
    data = json.loads(timed().to_json())
    del data[key]
    return json.dumps(data)


def test_read_errors_name_file_line_and_key(tmp_path):
    path = tmp_path / "x.jsonl"
    good = timed().to_json()
    for bad, message in (
        ("{", r"x\.jsonl:2: expected one JSON object, got '\{'"),
        ("[1]", r"x\.jsonl:2: expected one JSON object, got '\[1\]'"),
        (_without("policy"), r"x\.jsonl:2: policy: missing key; expected op, workload"),
        (good.replace('"driver"', '"drivers"'), r"x\.jsonl:2: env\.driver: missing key"),
        (good[:-1] + ', "note": 1}', r"x\.jsonl:2: note: unknown key"),
        (good.replace('"graph"', '"fast"'), r"x\.jsonl:2: policy: expected one of graph, eager, got 'fast'"),
    ):
        path.write_text(f"{good}\n{bad}\n")
        with pytest.raises(ValueError, match=message):
            read(path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        read(tmp_path / "none.jsonl")


def test_a_line_cut_short_costs_that_line_alone(tmp_path):
    path = tmp_path / "x.jsonl"
    first, second = timed(), timed(2e-3)
    append(path, first, second)
    for cut in (1, 20, len(second.to_json())):
        path.write_bytes((first.to_json() + "\n" + second.to_json()[:cut]).encode())
        assert read(path) == [first]
        append(path, second)
        assert read(path) == [first, second]
    path.write_text(second.to_json()[:20])
    append(path, first)
    assert read(path) == [first]


def test_results_path():
    assert results_path("nvidia-h200", "squares", "2026-11-21T10:00:00").as_posix() == (
        "results/nvidia-h200/2026-11-21-squares.jsonl"
    )


def test_the_newest_shipped_file_of_each_gpu_is_found(tmp_path):
    old, new, other = timed(run="old"), timed(run="new"), timed(run="other")
    append(results_path("h200", "cpu", "2026-01-02", tmp_path), old)
    append(results_path("h200", "cpu", "2026-11-21", tmp_path), new)
    append(results_path("a100", "cpu", "2025-01-01", tmp_path), other)
    append(results_path("h200", "not-cpu", "2026-12-01", tmp_path), old)
    assert shipped_records("cpu", root=tmp_path) == (other, new)
    assert shipped_records("cpu", slug="h200", root=tmp_path) == (new,)
    assert shipped_records("squares", root=tmp_path) == ()
    assert shipped_files("cpu", root=tmp_path / "none") == ()


def test_commands_show_the_newest_of_each_preset_and_nothing_of_the_tuner(tmp_path):
    def made(slug, name, compressed=False):
        path = tmp_path / slug / (name + ".jsonl" + ".xz" * compressed)
        append(path, timed(run=name))
        if compressed:
            path.write_bytes(lzma.compress(path.read_bytes()))
        return path

    for old in (
        "2026-01-02-cpu",
        "2026-01-02-tune",
        "2026-01-03-auto",
        "2026-01-02-rows-memory",
        "2026-01-02-parallel-2-gpus",
    ):
        made("h200", old)
    (tmp_path / "h200" / "2026-01-02-checks.json").write_text("{}")
    cpu = made("h200", "2026-02-01-cpu", compressed=True)
    memory, other = made("h200", "2026-01-03-rows-memory", compressed=True), made("a100", "2025-12-31-cpu")
    assert shown_files(tmp_path) == (other, cpu, memory)
    assert [r.run for r in shipped_records("cpu", root=tmp_path)] == ["2025-12-31-cpu", "2026-02-01-cpu"]
    assert memory in record_files(tmp_path) and cpu in record_files(tmp_path)


def test_a_compressed_file_that_is_none(tmp_path):
    path = tmp_path / "x.jsonl.xz"
    path.write_bytes(b"{}")
    with pytest.raises(ValueError, match="expected records, one JSON object to a line; this is no text"):
        read(path)


def test_shipped_records_are_readable():
    assert shipped_root().name == "results"
    for path in record_files():
        assert read(path), path
