"""--json: what a script reads is one JSON value on standard output, and all of it."""

import json
import os
import subprocess
import sys

import pytest

from expertile.lab.race.record import append
from tests.cli.test_cli import expertile, expertile_here
from tests.lab.records import timed


def answer(*args, code=0):
    done = expertile_here(*args)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_doctor():
    found = answer("doctor", "--json")
    by_name = {(b["operator"], b["backend"]): b for b in found["backends"]}
    assert by_name["grouped_mm", "loop"]["runs"] == 3 and not by_name["grouped_mm", "loop"]["reason"]
    assert by_name["grouped_mm", "triton_tma"]["runs"] == 0 and "CUDA" in by_name["grouped_mm", "triton_tma"]["reason"]
    assert {"attention", "scaled_grouped_mm", "moe", "softmax"} <= {operator for operator, _ in by_name}


def test_compare(tmp_path):
    append(tmp_path / "old.jsonl", timed(1e-3))
    append(tmp_path / "new.jsonl", timed(2e-3, run="r2"))
    found = answer("compare", tmp_path / "old.jsonl", tmp_path / "new.jsonl", "--json", code=1)
    (row,) = found["rows"]
    assert row["verdict"] == "slower" and row["regression"] and row["speedup"] == pytest.approx(0.5)


def test_explain_a_product_and_an_operator():
    (product,) = answer(
        "explain", "--gpu", "h200", "--groups", "4", "--tokens", "256", "-k", "64", "-n", "32", "--json"
    )
    assert product["work"]["flops"] == 2 * 256 * 64 * 32 and product["bound"]["limiter"] in ("compute", "memory")
    assert product["backend"] in [e["backend"] for e in product["estimates"]]
    softmax = answer("explain", "--op", "softmax", "--gpu", "h200", "--rows", "64", "--cols", "128", "--json")
    assert softmax["bound"]["limiter"] == "memory" and softmax["ways"]


def test_impact():
    found = answer("impact", "--model", "bert-base", "--json")
    assert any(line["pair"] for line in found["lines"]) and found["gpu"] == "NVIDIA H200"


def test_bench_prints_json_alone(tmp_path):
    (tmp_path / "loud.py").write_text(
        "import sys, torch\nsys.stdout.write('it is loaded\\n')\ndef fn(a, b, offs):\n    print('it is called')\n"
        "    return torch.nn.functional.grouped_mm(a, b, offs=offs)\n"
    )
    (tmp_path / "one.toml").write_text(
        'include = ["loop"]\nquick = true\nrounds = 3\n[[workload]]\nname = "tiny"\ndtype = "fp32"\nn = 32\nk = 64\n'
        "group_sizes = [5, 0, 27]\n"
    )
    loud = ("--candidate", "loud.py:fn")
    done = expertile("bench", "--config", "one.toml", *loud, "--no-html", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert {r["backend"] for r in found["records"]} == {"loop", "loud.py:fn", "dense", "copy"}
    assert "it is loaded" in done.stderr and "it is called" in done.stderr
    assert found["verdict"] and "Records:" in done.stderr


def test_a_terminal_without_utf8_ends_no_command(tmp_path):
    append(tmp_path / "gpu" / "a.jsonl", timed(1e-3), timed(2e-3, run="r2", date="2026-11-22"))
    command = [sys.executable, "-m", "expertile", "compare", "--history", str(tmp_path)]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    shown, answered = (
        subprocess.run([*command, *more], capture_output=True, env=env, check=True, timeout=200).stdout.decode("ascii")
        for more in ((), ("--json",))
    )
    assert "?" in shown and json.loads(answered)[0]["unit"] == "µs"


def test_compare_history(tmp_path):
    append(tmp_path / "gpu" / "a.jsonl", timed(1e-3), timed(2e-3, run="r2", date="2026-11-22"))
    (found,) = answer("compare", "--history", tmp_path, "--json")
    assert (found["device"], found["unit"]) == ("NVIDIA H200", "µs")
    assert [held["value"] for held in found["records"]["loop"]] == [1e-3, 2e-3]
