"""Decode and SonicMoE's sizes in docs/results/moe.md: ratios within a run, gaps named, prose that the shipped records
bear."""

from dataclasses import replace

import pytest

from expertile.device import Device
from expertile.lab.measure.env import Env
from expertile.lab.operators import operators, presets
from expertile.lab.race.record import append
from tests.lab.records import timed, untimed
from tools.pages.moe_presets import PRESETS, blocks, measured
from tools.pages.recorded import shipped

H200 = "NVIDIA H200"


def named(preset, name):
    return next(w for w in presets()[preset]() if w.name == name)


def fields(w, backend, **changes):
    op = operators()[w.op]
    work = op.baselines[0].work(w) if backend == "dense" else op.work(w)
    return {
        "op": w.op,
        "workload": f"{w.preset}/{w.name}",
        "shape": w.shape(),
        "dtype": w.dtype,
        "backend": backend,
        "flops": 0.0 if backend == "copy" else work.flops,
        "nbytes": work.nbytes,
        **changes,
    }


def record(w, backend, time_s, **changes):
    return timed(time_s, **fields(w, backend, bound=time_s / 2, **changes))


def absent(w, backend, reason, status="unsupported"):
    return untimed(status, reason, **fields(w, backend))


def rows(lines):
    return [line for text in lines for line in text.splitlines() if line.startswith("| ")][2:]


QWEN = named("moe-decode", "qwen3-30b-a3b-tokens1")
SONIC, TRAIN = (named("moe-sonic", f"T40960-H768-I512-E64-k4{end}") for end in ("", "-train"))


def test_decode_is_set_beside_copy_the_bound_and_the_others():
    found = [
        record(QWEN, "expertile", 40e-6),
        record(QWEN, "copy", 30e-6),
        record(QWEN, "torch", 50e-6),
        record(QWEN, "torch.compile", 80e-6),
        record(QWEN, "torch.compile-index-add", 60e-6),
        record(QWEN, "transformers", 100e-6),
    ]
    lines = blocks(found, H200)["decode"]
    # x, out, router and three matrices of 8 experts in 16 bits: 76.0 MB.
    assert rows(lines) == ["| qwen3-30b-a3b | 1 | 8 of 128 | 40.0 | 1.90 | 75 % | 50 % | 1.50× | 2.50× |"]


def test_what_has_no_record_is_named_and_what_failed_with_its_reason():
    other = named("moe-decode", "deepseek-v3-tokens8")
    found = [record(QWEN, "expertile", 40e-6), absent(other, "expertile", "out of memory", "failed")]
    text = "\n".join(blocks(found, H200)["decode"])
    names = [w.name for w in presets()["moe-decode"]() if w not in (QWEN, other)]
    (line,) = (line for line in text.splitlines() if "without a record yet" in line)
    assert line.split("`")[1::2] == names
    assert "`deepseek-v3-tokens8` has no time (failed): out of memory." in text
    assert len(rows([text])) == 1 and "– | – |" in rows([text])[0]


def test_with_every_workload_measured_nothing_is_missing():
    found = [record(w, "expertile", 1e-3) for w in presets()["moe-decode"]()]
    lines = blocks(found, H200)["decode"]
    assert "without a record" not in "\n".join(lines)
    assert len(rows(lines)) == len(found) - 1 and "small" not in "\n".join(lines)


def test_a_workload_is_compared_within_its_last_run_that_has_a_time_of_ours():
    other = named("moe-decode", "qwen3-30b-a3b-tokens8")
    found = [
        record(QWEN, "expertile", 40e-6, run="a"),
        record(QWEN, "copy", 30e-6, run="a"),
        record(QWEN, "expertile", 50e-6, run="b"),
        record(QWEN, "transformers", 100e-6, run="b"),
        record(QWEN, "copy", 10e-6, run="c"),
        record(other, "expertile", 70e-6, run="c", date="2026-11-23"),
    ]
    lines = blocks(found, H200)["decode"]
    first, second = rows(lines)
    assert "| 50.0 |" in first and first.endswith("| – | 50 % | – | 2.00× |")
    assert "| 70.0 |" in second
    assert lines[0].startswith("Recorded on NVIDIA H200, 2026-11-21, 2026-11-23, torch 2.11, triton 3.6.")


@pytest.mark.parametrize(
    "changes", [{"env": Env("other")}, {"policy": "eager"}, {"shape": {**QWEN.shape(), "top_k": 4}}, {"dtype": "fp16"}]
)
def test_other_gpus_policies_and_shapes_do_not_count(changes):
    found = [replace(record(QWEN, "expertile", 40e-6), **changes)]
    assert blocks(found, H200) == {"decode": [], "sonic": []}


def test_sonic_names_the_fastest_other_and_what_is_not_measured():
    found = [
        record(SONIC, "expertile", 1e-3),
        record(SONIC, "dense", 0.8e-3),
        record(SONIC, "copy", 1e-4),
        record(SONIC, "torch.compile", 2e-3),
        record(SONIC, "transformers", 1.5e-3),
        absent(SONIC, "sonicmoe", "sonicmoe is not installed"),
        absent(SONIC, "liger", "no liger"),
    ]
    lines = blocks(found, H200)["sonic"]
    row = "| 40960, 768, 512, 64, 4 | 1.00 | 387 | 80 % | `transformers` 1.50× | not measured | – | – | – |"
    assert rows(lines) == [row]
    assert lines[-1].endswith("took no part: sonicmoe is not installed.")


def test_training_has_columns_of_its_own_and_sonicmoe_can_play():
    found = [
        record(SONIC, "expertile", 1e-3),
        record(TRAIN, "expertile", 3e-3),
        record(TRAIN, "dense", 1.5e-3),
        record(TRAIN, "sonicmoe", 6e-3),
        absent(SONIC, "sonicmoe", "forward alone is not offered"),
    ]
    lines = blocks(found, H200)["sonic"]
    assert rows(lines)[0].endswith("| 1.00 | 387 | – | – | 3.00 | 387 | 50 % | `sonicmoe` 2.00× |")
    assert "took no part" not in "\n".join(lines)
    failed = [found[0], absent(TRAIN, "expertile", "crashed", "failed")]
    assert rows(blocks(failed, H200)["sonic"])[0].endswith("| failed | – | – | – |")


def test_all_shipped_files_of_the_presets_are_read(tmp_path):
    for name in ("2026-01-03-moe-decode", "2026-01-02-moe-decode", "2026-01-02-moe-sonic", "2026-01-02-moe"):
        append(tmp_path / "gpu" / f"{name}.jsonl", timed(run=name))
    runs = [r.run for r in shipped(PRESETS, "gpu", tmp_path)]
    assert runs == ["2026-01-02-moe-decode", "2026-01-03-moe-decode", "2026-01-02-moe-sonic"]
    assert shipped(PRESETS, "another", tmp_path) == []


def test_the_prose_under_decode_agrees_with_the_records():
    device = Device.by_name("h200")
    records = [r for r in shipped(PRESETS, device.slug) if r.policy == "graph" and r.env.gpu == device.name]
    found = {workload.name: contest for workload, contest in measured(records, PRESETS[0])}
    one = found["qwen3-30b-a3b-tokens1"]
    ours, copy = one.timed("expertile"), one.timed("copy")
    assert round(ours.time_s * 1e6, 1) == 27.5 and round(ours.bound_s * 1e6, 1) == 15.8
    assert round(copy.time_s / 0.9 * 1e6, 1) == 21.8
    timed_ones = {name: (m.timed("copy"), m.timed("expertile")) for name, m in found.items() if m.timed("expertile")}
    reached = {name: theirs.time_s / mine.time_s >= 0.9 for name, (theirs, mine) in timed_ones.items()}
    for model, first in (("qwen3-30b-a3b", 32), ("deepseek-v3", 1), ("gpt-oss-120b", 8)):
        by_tokens = {t: reached[name] for t in (1, 8, 32, 128) if (name := f"{model}-tokens{t}") in reached}
        assert by_tokens == {t: t >= first for t in by_tokens} and by_tokens[first]
