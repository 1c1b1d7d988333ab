"""Commands as a user types them: each once in a process of its own; mistakes and repeats, which measure nothing, in
this one."""

import contextlib
import importlib
import io
import json
import re
import subprocess
import sys
from unittest import mock

import pytest

from expertile.cli import main
from expertile.cli.app import COMMANDS


def expertile(*args, cwd=None, timeout=200):
    command = [sys.executable, "-m", "expertile", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout, check=False)


def expertile_here(*args, cwd="."):
    """`expertile` for a command that measures nothing, without the seconds that a process takes."""
    command, out, err, code = ["expertile", *map(str, args)], io.StringIO(), io.StringIO(), 0
    with contextlib.chdir(cwd), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            with mock.patch.object(sys, "argv", command):
                main()
        except SystemExit as end:
            code = end.code or 0
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """One real, tiny bench on this machine's CPU: a TOML file with one workload and a candidate."""
    folder = tmp_path_factory.mktemp("bench")
    (folder / "mine.py").write_text(
        "import torch\n"
        "def right(a, b, offs):\n"
        "    out, start = torch.empty(a.shape[0], b.shape[2], dtype=a.dtype), 0\n"
        "    for g, end in enumerate(offs.tolist()):\n"
        "        out[start:end] = a[start:end] @ b[g]\n"
        "        start = end\n"
        "    return out\n"
        "def wrong(a, b, offs):\n"
        "    return a @ b[0]\n"
    )
    (folder / "bench.toml").write_text(
        'quick = true\ncandidates = ["mine.py:right", "mine.py:wrong"]\n'
        '[[workload]]\nname = "tiny"\ndtype = "fp32"\nn = 32\nk = 64\ngroup_sizes = [5, 0, 27]\n'
    )
    done = expertile("bench", "--config", "bench.toml", "--out", "records", cwd=folder)
    # One of the two candidates is never right, and scripts are to notice.
    assert done.returncode == 1, done.stdout + done.stderr
    return folder, done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_the_overview_has_the_first_line_of_each_command(name):
    module, line = COMMANDS[name]
    assert getattr(importlib.import_module(f"expertile.cli.{module}"), name).__doc__.splitlines()[0] == line


def records(folder):
    (path,) = folder.glob("records/*/*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_bench_measures_gates_and_records(bench):
    folder, printed = bench
    by_backend = {r["backend"]: r for r in records(folder)}
    assert by_backend["loop"]["status"] == "ok" and by_backend["loop"]["value"] > 0
    assert {"dense", "copy"} <= by_backend.keys()
    assert by_backend["triton_tma"]["status"] == "unsupported" and "CUDA" in by_backend["triton_tma"]["reason"]
    statuses = {name: r["status"] for name, r in by_backend.items() if "mine" in name}
    assert sorted(statuses.values()) == ["ok", "wrong"]
    assert "tiny" in printed and "Report:" in printed


def test_bench_writes_a_report_that_opens_offline(bench):
    folder, _ = bench
    (page,) = folder.glob("records/*/*.html")
    text = page.read_text()
    assert "<html" in text and "tiny" in text and 'src="http' not in text


def test_compare_of_a_run_with_itself_is_all_ties(bench):
    folder, _ = bench
    (path,) = folder.glob("records/*/*.jsonl")
    done = expertile_here("compare", path, path)
    assert done.returncode == 0 and "tie" in done.stdout


def test_compare_exits_with_1_on_a_regression(bench, tmp_path):
    def changed(r, run, factor):
        time = r["value"] * factor
        return json.dumps({**r, "run": run, "value": time, "ci95": [time * 0.999, time * 1.001]})

    timed = [r for r in records(bench[0]) if r["status"] == "ok"]
    for run, factor in (("earlier", 1), ("later", 5)):
        lines = [changed(r, run, factor if r["backend"] == "loop" else 1) for r in timed]
        (tmp_path / f"{run}.jsonl").write_text("\n".join(lines) + "\n")
    done = expertile("compare", tmp_path / "earlier.jsonl", tmp_path / "later.jsonl")
    assert done.returncode == 1 and "slower" in done.stdout


def test_report_prints_markdown(bench):
    folder, _ = bench
    (path,) = folder.glob("records/*/*.jsonl")
    done = expertile("report", path, "--markdown")
    assert done.returncode == 0 and "| " in done.stdout and "tiny" in done.stdout


def test_doctor_names_every_backend_and_why_not():
    done = expertile("doctor")
    assert done.returncode == 0
    for name in ("loop", "torch_grouped", "triton_tma", "quack"):
        assert name in done.stdout
    assert "needs" in done.stdout


def test_explain_for_a_gpu_that_is_not_here():
    done = expertile("explain", "--gpu", "RTX 4090", "--tokens", "2048", "--groups", "8", "-k", "4096", "-n", "14336")
    assert done.returncode == 0
    assert "RTX 4090" in done.stdout and "bound" in done.stdout and "model" in done.stdout


@pytest.mark.parametrize(
    "args, message",
    [
        (["bench", "--preset", "sqares"], "expected .*squares.*, got 'sqares'"),
        (["bench", "--backend", "cutlass"], "backend: expected one of .*loop.*, got 'cutlass'"),
        (["bench", "--policy", "warm"], "policy: expected .*graph.*, got 'warm'"),
        (["bench", "--candidate", "nowhere.py:fn"], "nowhere.py"),
        (["bench", "--preset", "models", "--routing", "fair"], "routing: expected .*uniform.*, got 'fair'"),
        (["bench", "--config", "absent.toml"], "absent.toml"),
        (["explain", "--gpu", "abacus"], "gpu: no known device in 'abacus'"),
        (["explain", "--dtype", "int3"], "dtype: expected .*, got 'int3'"),
        (["explain", "--top-k", "9", "--groups", "8"], "top_k: expected .*, got 9"),
        (["audit", "absent.md"], "absent.md"),
        (["compare", "absent.jsonl", "absent.jsonl"], "absent.jsonl"),
        (["report", "absent.jsonl"], "absent.jsonl"),
        (["report", "--check"], "check: expected --readme with it"),
    ],
)
def test_a_users_mistake_is_one_line(args, message, tmp_path):
    done = expertile_here(*args, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(message, done.stderr, re.S), done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) <= 3
