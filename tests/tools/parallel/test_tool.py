"""tools.parallel on a CPU: the whole of it, and its end when time is up or a rank has died."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from expertile.lab.race.record import read
from tools.parallel import launch
from tools.parallel.records import OPS
from tools.parallel.run import Options
from tools.parallel.ways import COMMUNICATION, COMPUTE, STEP

ROOT = Path(__file__).parents[3]


def test_it_measures_within_its_limit(tmp_path):
    out = tmp_path / "deep" / "parallel.jsonl"
    words = ["--device", "cpu", "--quick", "--seconds", "60", "--out", str(out)]
    command = [sys.executable, "-m", "tools.parallel", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    records = read(out)
    assert {r.status for r in records} == {"ok"} and len({r.run for r in records}) == 1
    steps = [r for r in records if r.config.get("kind") == STEP]
    assert {r.op for r in steps} == set(OPS) and {r.details["tokens_of_gpu"] for r in steps} == {4, 48}
    for r in records:
        assert r.shape["gpus"] == 2 and r.details["collectives"] == "gloo" and r.details["nccl_nvls_enable"] == "0"
        assert r.details["rounds"] >= 3 and r.ci95_s[0] <= r.time_s <= r.ci95_s[1]
    assert all(r.details["errors"]["out"] <= 0.0157 and r.flops > 0 for r in steps)
    assert {"all_to_all", *OPS} == {r.op for r in records}
    assert {r.config["kind"] for r in records if r.op in OPS} == {STEP, COMPUTE, COMMUNICATION}


def _hanging(rank, world, options, folder, started):
    time.sleep(60)


def _dying(rank, world, options, folder, started):
    if rank == 1:
        os._exit(3)
    time.sleep(60)


@pytest.mark.parametrize(("process", "seconds", "codes"), [(_hanging, 2.0, [-9, -9]), (_dying, 50.0, [-9, 3])])
def test_it_ends_whatever_its_ranks_do(process, seconds, codes, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(launch, "rank_main", process)
    monkeypatch.setattr(launch, "_AFTER_ANOTHER_S", 0.5)
    options = Options(out=tmp_path / "x.jsonl", device="cpu", seconds=seconds)
    assert launch.launch(options) == 1
    assert f"ranks ended with {codes}" in capsys.readouterr().out
