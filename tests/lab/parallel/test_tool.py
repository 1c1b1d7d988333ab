"""tools/measure_parallel.py on a CPU: the whole of it, and its end when time is up or a rank has died."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from expertile.lab.parallel import launch
from expertile.lab.parallel.run import Options

TOOL = Path(__file__).parents[3] / "tools" / "measure_parallel.py"


def test_it_measures_within_its_limit(tmp_path):
    out = tmp_path / "deep" / "parallel.jsonl"
    command = [sys.executable, str(TOOL), "--device", "cpu", "--quick", "--seconds", "60", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *parts = map(json.loads, out.read_text().splitlines())
    assert first["part"] == "environment" and first["world"] == 2 and first["backend"] == "gloo"
    assert first["nccl_nvls_enable"] == "0"
    steps = [part for part in parts if part["part"] == "step"]
    assert {step["status"] for step in steps} == {"ok"}
    assert {step["decode"] for step in steps} == {False, True} and {s["world"] for s in steps} == {1, 2}
    for step in steps:
        assert step["errors"]["out"] <= 0.0157 and step["rounds"] >= 3
        for name, seconds in step["seconds"].items():
            assert all(seconds.values()) and step["work"][name][0] > 0
    assert any(part["part"] == "bandwidth" for part in parts)


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
