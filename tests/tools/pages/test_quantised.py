"""docs/results/quantised.md: its figures are the records' and arithmetic's, and without records it says that nothing
was measured."""

from dataclasses import replace
from pathlib import Path

import pytest

from expertile.device import Device
from expertile.lab.measure.env import Env
from expertile.lab.operators import operators, presets
from tests.lab.records import timed, untimed
from tools.pages.quantised import NOT_MEASURED, _errors, blocks, weight_nbytes

PAGE = Path(__file__).parents[3] / "docs" / "results" / "quantised.md"
H200 = Device.by_name("h200")


def record(w, backend, time_s, policy="graph", **changes):
    work = operators()[w.op].work(w)
    return timed(
        time_s,
        op=w.op,
        workload=f"{w.preset}/{w.name}",
        shape=w.shape(),
        dtype=w.dtype,
        backend=backend,
        policy=policy,
        flops=work.flops,
        nbytes=work.nbytes,
        bound=time_s / 2,
        **changes,
    )


def named(preset, name, op="scaled_grouped_mm"):
    return next(w for w in presets()[preset]() if w.name == name and w.op == op)


def test_without_records_nothing_is_measured():
    texts = blocks([], H200)
    assert {name for name, text in texts.items() if text == NOT_MEASURED} == set(texts) - {"errors"}
    w = named("fp8-large", "fp8-small")
    elsewhere = record(w, "expertile", 1e-3, env=Env("other"))
    assert blocks([elsewhere], H200)["large"] == NOT_MEASURED


def test_the_sweep_has_deep_gemm_where_it_ran_beside_ours():
    w = named("fp8-sweep", "fp8-e1-m64-n4096-k7168")
    found = [record(w, "expertile", 8e-6), record(w, "expertile", 50e-6, "eager"), record(w, "torch", 16e-6)]
    text = blocks(found, H200)["sweep"]
    assert "DeepGEMM has no time in this run" in text
    assert text.splitlines()[-1].endswith("| 50.0 | 2.00× | – |")
    beside = blocks([*found, record(w, "deepgemm", 12e-6)], H200)["sweep"]
    assert "has no time" not in beside and beside.splitlines()[-1].endswith("| 50.0 | 2.00× | – | 1.50× |")
    elsewhere = record(w, "deepgemm", 12e-6, run="another")
    assert "DeepGEMM has no time" in blocks([elsewhere, *found], H200)["sweep"]


def test_causes_and_the_error_of_multiplied_scales():
    w = named("fp8-causes", "gemm1-m64", "fp8_causes")
    wrong = untimed("wrong", op=w.op, workload=f"{w.preset}/{w.name}", backend="multiplied", policy="eager")
    found = [
        record(w, "expertile", 1e-5),
        record(w, "expertile", 2e-5, "eager"),
        record(w, "expertile-row", 0.9e-5),
        record(w, "expertile-padded", 6e-5, "eager"),
        replace(wrong, rel_error=0.97),
    ]
    row = blocks(found, H200)["causes"].splitlines()[-1]
    assert row == "| gemm1-m64 | 10.0 | 0.90× | – | – | – | 20.0 | 3.00× | 0.970 |"


def test_the_table_of_memory_and_speed():
    found = []
    for projection in ("gate-up", "down"):
        name = f"mixtral-{projection}-decode"
        int4 = named("int4-models", name, "int4_grouped_mm")
        found += [record(int4, "bf16", 4e-4), record(int4, "expertile", 1e-4)]
        found += [record(named("int4-models", name), "expertile", 2e-4)]
    rows = [line.split(" | ") for line in blocks(found, H200)["models"].splitlines() if line.startswith("| mixtral")]
    assert [[row[2], row[3], row[5]] for row in rows] == [
        ["bf16", "800", "1.00×"],
        ["FP8", "400", "2.00×"],
        ["INT4", "200", "4.00×"],
    ]
    assert [row[8] for row in rows] == ["1.00×", "2.00×", "3.88×"]
    assert weight_nbytes("mixtral", "bf16") == pytest.approx(3 * 8 * 4096 * 14336 * 2)


def test_each_operator_stands_with_its_own_last_run_beside_its_own_bf16():
    found = []
    for projection in ("gate-up", "down"):
        name = f"mixtral-{projection}-decode"
        int4, fp8 = named("int4-models", name, "int4_grouped_mm"), named("int4-models", name, "scaled_grouped_mm")
        found += [record(int4, "bf16", 4e-4), record(int4, "expertile", 1e-4), record(fp8, "expertile", 9e-4)]
        found += [record(fp8, "bf16", 6e-4, run="later"), record(fp8, "expertile", 2e-4, run="later")]
    rows = [line.split(" | ")[2:6] for line in blocks(found, H200)["models"].splitlines() if "decode" in line]
    assert rows == [["bf16", "800", "800", "1.00×"], ["FP8", "400", "1,200", "3.00×"], ["INT4", "200", "800", "4.00×"]]


def test_errors_fall_with_the_group():
    by_group = [_errors("int4", group)[1] for group in (32, 64, 128, 0)]
    assert by_group == sorted(by_group) and _errors("fp8", 0)[1] < by_group[0]
    assert 0.02 < _errors("fp8", 0)[0] < 0.03
