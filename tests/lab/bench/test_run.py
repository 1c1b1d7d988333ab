"""A whole run on the CPU with small workloads and stand-in backends: every outcome becomes a record."""

import json
import os
import time
from dataclasses import dataclass, replace

import pytest
import torch

from expertile.device import Device
from expertile.lab.bench import run as run_module
from expertile.lab.bench.run import Event, record_name, run
from expertile.lab.race.record import Record, read
from expertile.lab.race.workloads import ragged_m, wgrad
from expertile.ops.backend import NoConfig
from expertile.ops.grouped_mm.backend import Backend
from expertile.ops.grouped_mm.problem import Layout
from tests.ops.grouped_mm.reference import reference

SMALL = ragged_m("small", "test", (12, 0, 20), 32, 24, "fp32", routing="by hand")
OTHER = wgrad("other", "test", (8, 16), 16, 24, "bf16")


def correct(problem, operands, config, out):
    right = reference(operands.a, operands.b, operands.offs).to(problem.out_dtype)
    if out is None:
        return right
    live = ~torch.isnan(right)
    out[live] = right[live]
    return out


def backend(name, compute=correct, supports=lambda p, d: None, configs=lambda p, d: (NoConfig(),)):
    return Backend(name, f"{name} for a test", compute, supports, configs)


def wrong(problem, operands, config, out):
    result = correct(problem, operands, config, out)
    result[0] += 1.0
    return result


def out_of_memory(problem, operands, config, out):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99.00 GiB")


def records(*backends, workloads=(SMALL,), **options):
    options = {"seconds": 1.0, "device": "cpu", "seed": 3, **options}
    return list(run(workloads, backends, **options))


def by_backend(found):
    return {r.backend: r for r in found}


def test_every_outcome_is_a_record():
    found = by_backend(
        records(
            backend("good"),
            backend("wrong", wrong),
            backend("big", out_of_memory),
            backend("picky", supports=lambda p, d: "needs a larger K"),
        )
    )
    assert set(found) == {"good", "wrong", "big", "picky", "dense", "copy"}
    good = found["good"]
    assert good.status == "ok" and good.policy == "eager"
    assert good.ci95_s[0] <= good.time_s <= good.ci95_s[1]
    assert good.flops == 2 * 32 * 32 * 24
    assert good.nbytes == 4 * (32 * 32 + 2 * 32 * 24 + 32 * 24)  # the empty group's weight is not read
    assert good.tflops == pytest.approx(good.flops / good.time_s / 1e12)
    assert good.rel_error < 1e-6 and good.max_error < 1e-5
    assert good.workload == record_name(SMALL) == "test/small" and good.shape["group_sizes"] == [12, 0, 20]
    assert good.env.gpu and good.env.torch == torch.__version__
    assert (found["wrong"].status, found["wrong"].time_s) == ("wrong", None)
    assert found["wrong"].rel_error > 0.01 and "error" in found["wrong"].reason
    assert found["big"].status == "unsupported" and "out of memory" in found["big"].reason
    assert (found["picky"].status, found["picky"].reason) == ("unsupported", "needs a larger K")
    assert found["dense"].status == found["copy"].status == "ok"
    assert found["copy"].config["way"] in ("memcpy", "kernel") and found["dense"].config == {}
    assert found["copy"].flops == 0 and found["dense"].flops == good.flops
    assert len({r.run for r in found.values()}) == 1


def test_a_backend_that_fails_only_when_timed_is_a_record():
    calls = {"n": 0}

    def tired(problem, operands, config, out):
        calls["n"] += 1
        if calls["n"] > 4:
            raise RuntimeError("device-side assert")
        return correct(problem, operands, config, out)

    found = by_backend(records(backend("tired", tired), backend("good")))
    assert found["tired"].status == "failed" and found["tired"].reason == "RuntimeError: device-side assert"
    assert found["good"].status == "ok"


def test_a_time_below_the_bound_is_refused(monkeypatch):
    from expertile.roofline import Bound

    monkeypatch.setattr(run_module, "bound", lambda work, device, key: Bound(10.0, "compute"))
    found = by_backend(records(backend("good")))
    assert found["good"].status == "refused" and "below the bound of 1e+07 us: " in found["good"].reason
    assert "times what the device can do" in found["good"].reason
    assert found["good"].time_s < 10.0


def test_records_are_written_at_once_and_a_run_resumes(tmp_path):
    path = tmp_path / "out.jsonl"
    workloads = (SMALL, OTHER)
    stream = run(workloads, [backend("one"), backend("two")], out_path=path, seconds=1.0, device="cpu")
    first = [next(stream) for _ in range(2)]
    stream.close()  # interrupted in the middle of the first workload
    assert [r.backend for r in read(path)] == ["one", "two"]

    events: list[Event] = []
    rest = list(
        run(
            workloads,
            [backend("one"), backend("two")],
            out_path=path,
            resume=True,
            seconds=1.0,
            device="cpu",
            on_event=events.append,
        )
    )
    assert {(r.workload, r.backend) for r in rest} == {
        ("test/small", "dense"),
        ("test/small", "copy"),
        *(("test/other", name) for name in ("one", "two", "dense", "copy")),
    }
    assert {r.run for r in rest} == {first[0].run}
    assert len(read(path)) == 8
    assert any(e.kind == "note" and "2 records" in e.text for e in events)
    assert records(backend("one"), backend("two"), workloads=workloads, out_path=path, resume=True) == []


def test_an_edited_candidate_is_not_resumed(tmp_path):
    path, source = tmp_path / "out.jsonl", tmp_path / "mine.py"
    right = "import torch\ndef fn(a, b, offs):\n    return torch.nn.functional.grouped_mm(a, b, offs=offs)\n"

    def measured(factor, when):
        source.write_text(right.replace("return torch", f"return {factor} * torch"))
        os.utime(source, (when, when))
        new = records(backend("one"), workloads=(SMALL,), candidates=[f"{source}:fn"], out_path=path, resume=True)
        return {r.backend: r.status for r in new}

    now = time.time()
    assert measured(1, now - 9)["mine.py:fn"] == "ok"
    assert measured(1, now - 9) == {}
    assert measured(3, now + 9) == {"mine.py:fn": "wrong"}
    assert [r.status for r in read(path) if r.backend == "mine.py:fn"] == ["wrong"]


def test_a_changed_shape_or_machine_is_not_resumed(tmp_path):
    path = tmp_path / "out.jsonl"
    old = records(backend("one"), out_path=path)
    moved = SMALL.with_sizes((13, 0, 19))
    assert len(records(backend("one"), workloads=(moved,), out_path=path, resume=True)) == 3
    line = json.loads(path.read_text().splitlines()[0])
    line["env"]["torch"] = "1.0"
    path.write_text(json.dumps(line) + "\n")
    fresh = records(backend("one"), out_path=path, resume=True)
    assert len(fresh) == 3 and fresh[0].run != old[0].run


def test_without_resume_a_file_is_appended_to_under_a_new_run(tmp_path):
    path = tmp_path / "out.jsonl"
    first, second = (records(backend("one"), out_path=path) for _ in range(2))
    assert len(read(path)) == 6 and first[0].run != second[0].run


def test_unsupported_workloads_are_listed_and_never_run():
    from dataclasses import replace

    def never(problem, operands, config, out):
        raise AssertionError("ran")

    found = records(backend("one", never), workloads=(replace(SMALL, unsupported="no such experts"),))
    assert [(r.backend, r.status, r.reason) for r in found] == [("one", "unsupported", "no such experts")]


def test_a_workload_larger_than_memory_is_a_reason(monkeypatch):
    monkeypatch.setattr(run_module, "free_memory", lambda device: 1 << 20)
    found = records(backend("one"))
    assert [r.status for r in found] == ["unsupported"]
    assert "needs about" in found[0].reason and "0.0 GB are free" in found[0].reason


def test_a_device_that_dies_ends_in_reasons_not_in_a_lost_run(monkeypatch):
    alive = {"yes": True}
    for module in ("measure.interleaved", "bench.run"):
        monkeypatch.setattr(f"expertile.lab.{module}.device_alive", lambda device: alive["yes"])

    def crash(problem, operands, config, out):
        if problem.layout is Layout.RAGGED_K:
            alive["yes"] = False
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return correct(problem, operands, config, out)

    third = SMALL.with_sizes((1, 2, 3), name="third")
    found = records(backend("good"), backend("crash", crash), workloads=(SMALL, OTHER, third))
    status = {(r.workload, r.backend): (r.status, r.reason) for r in found}
    assert status["test/small", "crash"][0] == status["test/small", "good"][0] == "ok"
    assert status["test/other", "crash"][0] == "failed"
    assert "illegal memory access" in status["test/other", "crash"][1]
    assert status["test/other", "good"][0] == "unsupported"
    assert "crash left the device unusable" in status["test/other", "good"][1]
    assert "crash left the device unusable" in status["test/third", "good"][1]


@dataclass(frozen=True)
class Rest:
    seconds: float


def test_configs_are_screened_and_the_best_stands_beside_the_default():
    import time

    def slow(problem, operands, config, out):
        time.sleep(config.seconds)
        return correct(problem, operands, config, out)

    rests = (Rest(0.004), Rest(0.008), Rest(0.0))
    tuned = backend("tuned", slow, configs=lambda p, d: rests)
    found = [r for r in records(tuned, tune_configs=True) if r.backend == "tuned"]
    assert [r.config for r in found] == [{"seconds": 0.004}, {"seconds": 0.0, "tried": 3}]
    assert found[1].time_s < found[0].time_s
    assert [r.config for r in records(tuned) if r.backend == "tuned"] == [{"seconds": 0.004}]


def test_events_tell_the_whole_story():
    events: list[Event] = []
    found = records(backend("one"), backend("no", supports=lambda p, d: "no"), on_event=events.append)
    kinds = [e.kind for e in events]
    assert kinds[:2] == ["start", "workload"] and kinds[-1] == "end"
    assert [e.record for e in events if e.kind == "record"] == found
    assert [(e.backend, e.text) for e in events if e.kind == "gate"] == [("one", "ok"), ("no", "no")]
    rounds = [e for e in events if e.kind == "round"]
    assert rounds and set(rounds[-1].medians) == {"one"}
    last = [e for e in events if e.kind == "record"][-1]
    assert last.done == last.total == 4 and last.eta_s == 0


def test_arguments_are_checked_at_once(tmp_path):
    with pytest.raises(ValueError, match="policies: expected graph or eager, got 'warm'"):
        run([SMALL], [], policies=("warm",), device="cpu")
    with pytest.raises(ValueError, match="graph policy needs a CUDA device"):
        run([SMALL], [], policies=("graph",), device="cpu")
    with pytest.raises(ValueError, match="no file"):
        run([SMALL], [], candidates=[f"{tmp_path}/missing.py:fn"], device="cpu")


def test_candidates_are_raced_and_their_failures_are_rows(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os, torch\n"
        "def good(a, b, offs):\n"
        "    return torch.nn.functional.grouped_mm(a, b, offs=offs)\n"
        "def crash(a, b, offs):\n"
        "    os.abort()\n"
        "calls = []\n"
        "def leave(a, b, offs):\n"
        "    calls.append(a)\n"
        "    return good(a, b, offs) if len(calls) < 25 else exit(3)\n"
    )
    found = by_backend(
        records(
            backend("one"),
            candidates=[f"{tmp_path}/mine.py:{name}" for name in ("good", "crash", "leave")],
            candidate_timeout_s=60,
            seconds=3.0,
        )
    )
    assert found["mine.py:good"].status == "ok" and found["mine.py:good"].rel_error < 1e-5
    assert found["mine.py:crash"].status == "failed"
    assert found["mine.py:crash"].reason == "crashes: its process was ended by SIGABRT"
    assert (found["mine.py:leave"].status, found["mine.py:leave"].reason) == (
        "failed",
        "RuntimeError: it exits with code 3",
    )
    assert found["one"].status == "ok"


def test_a_candidate_that_computes_in_the_gate_alone_is_wrong_once_it_was_timed(tmp_path):
    (tmp_path / "sly.py").write_text(
        "import time, torch\n"
        "calls, kept = [0], {}\n"
        "def right(a, b, offs):\n"
        "    time.sleep(1e-3)\n"
        "    return torch.nn.functional.grouped_mm(a, b, offs=offs)\n"
        "def tires(a, b, offs):\n"
        "    calls[0] += 1\n"
        "    return right(a, b, offs) * (1 if calls[0] < 30 else 2)\n"
        "def by_address(a, b, offs):\n"
        "    time.sleep(1e-3)\n"
        "    key = a.data_ptr(), a._version, b.data_ptr()\n"
        "    return kept[key] if key in kept else kept.setdefault(key, right(a, b, offs))\n"
    )
    names = ("right", "tires", "by_address")
    found = by_backend(records(candidates=[f"{tmp_path}/sly.py:{name}" for name in names], seconds=3.0))
    assert found["sly.py:right"].status == "ok" and found["sly.py:right"].value > 1e-3
    for name in names[1:]:
        record = found[f"sly.py:{name}"]
        assert record.status == "wrong" and record.value is None
    assert found["sly.py:tires"].reason.startswith("after it was timed, on new values in the same memory: relative")


def test_the_bounds_of_a_cpu_are_of_what_it_reached(monkeypatch):
    roofs = replace(Device.current("cpu"), memory_bps=1e6, peak_flops={"fp32": 1e6})
    monkeypatch.setattr(run_module, "with_measured_roofs", lambda device, dtypes: roofs)
    found = by_backend(records(backend("good")))
    right = [r for r in found.values() if r.status == "ok"]
    assert {"good", "copy", "dense"} <= {r.backend for r in right}
    assert all(0 < r.bound <= r.value for r in right)
    # So low are these roofs that the fastest of each limiter stands at its bound.
    for limiter in {r.limiter for r in right}:
        assert max(r.bound / r.value for r in right if r.limiter == limiter) == pytest.approx(1)


def test_without_a_measured_peak_the_limit_is_unknown(monkeypatch):
    roofs = replace(Device.current("cpu"), memory_bps=1e12, peak_flops={})
    monkeypatch.setattr(run_module, "with_measured_roofs", lambda device, dtypes: roofs)
    found = by_backend(records(backend("good")))
    assert (found["good"].bound, found["good"].limiter) == (0.0, "unknown")
    assert found["copy"].limiter == "memory"


def test_a_record_of_a_cpu_names_its_threads_cores_and_load():
    first = records(backend("good"))[0]
    assert first.env.cores >= 1 and first.env.threads == torch.get_num_threads() and first.env.load >= 0
    assert Record.from_json(first.to_json()) == first
