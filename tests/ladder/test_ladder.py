"""The ladder as a whole: its order, its workloads, its size, and what runs without a GPU."""

from pathlib import Path

import pytest
import torch

from expertile import ladder
from expertile.device import Device
from expertile.lab.bench.presets import preset
from expertile.lab.bench.run import run
from expertile.lab.race.workloads import ragged_m
from expertile.ladder import RUNGS
from expertile.ops.grouped_mm.problem import Layout

H200 = Device.by_name("h200")


def test_eight_rungs_in_order():
    assert [rung.name for rung in RUNGS] == [
        "1_naive_loop",
        "2_padded_bmm",
        "3_masked_pointer",
        "4_hints_unmasked",
        "5_persistent",
        "6_tma",
        "7_l2_order",
        "8_warp_specialised",
    ]


def test_every_rung_is_one_short_file_that_says_what_changed():
    folder = Path(ladder.__file__).parent
    rungs = [p for p in folder.glob("*.py") if p.name[0] != "_"]
    assert len(rungs) == len(RUNGS)
    for path in rungs:
        text = path.read_text()
        assert len(text.splitlines()) <= 160, path.name
        assert path.name == "naive_loop.py" or ("Changed from rung" in text and "Spends less of:" in text), path.name


def test_workloads():
    found = {w.name: w for w in preset("ladder")}
    assert {n: (w.groups, w.m, w.k, w.n) for n, w in found.items()} == {
        "moe-ffn-up": (8, 16384, 4096, 14336),
        "64x1024": (64, 65536, 1024, 1024),
        "16x2048": (16, 32768, 2048, 2048),
        "decode": (128, 1024, 2048, 1536),
    }
    assert {w.preset for w in found.values()} == {"ladder"}


def test_an_h200_runs_every_rung_on_every_workload():
    for workload in preset("ladder"):
        problem = workload.problem("cuda")
        assert [rung.supports(problem, H200) for rung in RUNGS] == [None] * len(RUNGS)


def test_panels_are_higher_than_one_tile_row_where_a_group_has_several():
    up = next(w for w in preset("ladder") if w.name == "moe-ffn-up").problem("cuda")
    (tma,), (ordered,) = RUNGS[5].configs(up, H200), RUNGS[6].configs(up, H200)
    assert tma.group_m == 1 and ordered.group_m > 4
    assert (tma.block_m, tma.block_n, tma.num_stages) == (ordered.block_m, ordered.block_n, ordered.num_stages)


@pytest.mark.parametrize("dtype, layout", [("fp32", Layout.RAGGED_M), ("bf16", Layout.RAGGED_K)])
def test_other_problems_are_refused_with_a_reason(dtype, layout):
    from dataclasses import replace

    problem = ragged_m("w", "p", (64, 64), 64, 64, dtype).problem("cuda")
    for rung in RUNGS:
        assert "the ladder" in (rung.supports(replace(problem, layout=layout), H200) or "")


def test_on_a_cpu_loop_and_bmm_run_and_the_others_say_what_they_need():
    small = ragged_m("small", "ladder", (40, 0, 24), 64, 48, "bf16")
    records = list(run([small], RUNGS, policies=("eager",), device=torch.device("cpu"), rounds=3))
    status = {r.backend: (r.status, r.reason) for r in records}
    assert status["1_naive_loop"] == status["2_padded_bmm"] == ("ok", "")
    for rung in RUNGS[2:]:
        assert status[rung.name][0] == "unsupported" and status[rung.name][1].startswith("needs")
