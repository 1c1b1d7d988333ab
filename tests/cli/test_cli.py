"""Commands as a user types them: each once in a process of its own; mistakes and repeats, which measure nothing, in
this one."""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from expertile.cli import main
from expertile.cli.app import COMMANDS, function
from expertile.lab.measure.env import Env
from expertile.lab.race.record import append
from expertile.version import __version__
from tests.lab.records import timed, untimed


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
    assert function(name).__doc__.splitlines()[0] == COMMANDS[name]


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
    assert done.returncode == 0 and re.search("no regression: .*(tie|inconclusive)", done.stdout)


def test_compare_refuses_two_devices_unless_asked(tmp_path):
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    append(here, timed(env=Env("Some CPU")))
    append(there, timed())
    done = expertile_here("compare", here, there)
    assert done.returncode == 2 and not done.stdout
    assert "records of one device, got Some CPU and NVIDIA H200" in done.stderr
    assert "gpu: Some CPU -> NVIDIA H200" in expertile_here("compare", here, there, "--across-devices").stdout


def test_compare_of_nothing_that_both_measured_is_no_pass(tmp_path):
    append(tmp_path / "old.jsonl", timed(workload="one"))
    append(tmp_path / "new.jsonl", timed(workload="another"))
    done = expertile_here("compare", tmp_path / "old.jsonl", tmp_path / "new.jsonl")
    assert done.returncode == 2 and "nothing that both measured" in done.stdout


def test_rows_without_a_value_are_hidden_with_the_ties(tmp_path):
    append(tmp_path / "one.jsonl", timed(), untimed("unsupported", backend="quack"))
    shown = [expertile_here("compare", *[tmp_path / "one.jsonl"] * 2, o).stdout for o in ("--ties", "--no-ties")]
    assert "quack" in shown[0] and "quack" not in shown[1]


@pytest.mark.parametrize(
    ("place", "why"),
    [("file", "expected a folder"), ("file/below", "expected a folder"), ("/proc/foo", "cannot make the folder")],
)
@pytest.mark.parametrize("command", [("bench", "--preset", "cpu"), ("tune",)])
def test_out_is_tried_before_anything_is_measured(command, place, why, tmp_path):
    (tmp_path / "file").touch()
    done = expertile_here(*command, "--out", place, cwd=tmp_path)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"expertile: out: {why}") and place in done.stderr


@pytest.mark.parametrize(
    ("place", "why"), [(".", "expected a file, got the folder"), ("/proc/foo/x.html", "cannot make the folder")]
)
def test_a_report_is_refused_a_place_before_its_records_are_read(place, why, tmp_path):
    done = expertile_here("report", "absent.jsonl", "--out", place, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.startswith(f"expertile: out: {why}")


def test_a_candidate_that_hangs_fails_after_its_timeout(bench, tmp_path):
    folder, _ = bench
    (folder / "slow.py").write_text("import time\ndef fn(a, b, offs):\n    time.sleep(60)\n")
    config = (folder / "bench.toml").read_text().replace('["mine.py:right", "mine.py:wrong"]', '["slow.py:fn"]')
    (folder / "slow.toml").write_text(config)
    options = ("--config", folder / "slow.toml", "--timeout", "10", "--backend", "loop", "--no-html")
    done = expertile("bench", *options, "--out", tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    held = [json.loads(line) for line in next(tmp_path.glob("*/*.jsonl")).read_text().splitlines()]
    (slow,) = [r for r in held if r["backend"] == "slow.py:fn"]
    assert (slow["status"], slow["reason"]) == ("failed", "hangs: no result after 10 s")


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


def test_compare_history_prints_and_draws(tmp_path):
    for day, time in ((1, 2e-3), (2, 1e-3)):
        append(tmp_path / "gpu" / f"2026-11-0{day}-p.jsonl", timed(time, run=f"r{day}", date=f"2026-11-0{day}"))
    done = expertile_here("compare", "--history", tmp_path, "--out", tmp_path / "page" / "history.html")
    assert done.returncode == 0 and "faster" in done.stdout and "█▁" in done.stdout
    assert 'class="plot"' in (tmp_path / "page" / "history.html").read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "compare: expected OLD and NEW, two files of records, or --history FOLDER"),
        (("a.jsonl",), "compare: expected OLD and NEW"),
        (("a", "b", "--only", "x"), "only: expected with --history"),
        (("a", "--history", "."), "history: expected a folder and no files, got a as well"),
        (("--history", "nowhere"), "history: nowhere is no folder"),
    ],
)
def test_compare_says_what_it_wants(args, message, tmp_path):
    done = expertile_here("compare", *args, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr


def test_a_history_of_one_run_answers_nothing(tmp_path):
    append(tmp_path / "a.jsonl", timed())
    done = expertile_here("compare", "--history", tmp_path)
    assert done.returncode == 2 and "has been measured in two runs" in done.stdout


def test_report_without_files_writes_an_index_and_small_pages(tmp_path):
    done = expertile_here("report", "--out", tmp_path / "site")
    assert done.returncode == 0, done.stderr
    index = (tmp_path / "site" / "index.html").read_text()
    pages = sorted(path for path in (tmp_path / "site").glob("*.html") if path.name != "index.html")
    assert len(pages) > 5 and all(f'href="{page.name}"' in index for page in pages)
    assert max(page.stat().st_size for page in pages) < 500e3
    assert sum(path.stat().st_size for path in (tmp_path / "site").iterdir()) < 2e6
    assert all('<script src="report.js">' in page.read_text() for page in pages)
    assert (tmp_path / "site" / "report.js").is_file() and (tmp_path / "site" / "report.css").is_file()
    assert len(done.stdout.splitlines()) < 20 * len(pages)


def test_report_reads_a_file_given_twice_once(tmp_path):
    append(tmp_path / "own.jsonl", timed())
    done = expertile("report", tmp_path / "own.jsonl", tmp_path / "." / "own.jsonl")
    assert done.returncode == 0 and "1 of 1 record has a right result" in " ".join(done.stdout.split())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_full_disk_is_one_line(tmp_path):
    append(tmp_path / "own.jsonl", timed())
    done = expertile_here("report", tmp_path / "own.jsonl", "--out", "/dev/full")
    assert done.returncode == 2 and done.stderr == "expertile: [Errno 28] No space left on device\n"


def test_report_prints_markdown(bench):
    folder, _ = bench
    (path,) = folder.glob("records/*/*.jsonl")
    done = expertile("report", path, "--markdown")
    assert done.returncode == 0 and "| " in done.stdout and "tiny" in done.stdout


@pytest.mark.parametrize("option", ["-h", "--help"])
@pytest.mark.parametrize("command", [(), ("bench",), ("compare",)])
def test_help_has_a_short_name(command, option):
    done = expertile_here(*command, option)
    assert done.returncode == 0 and "Usage: " in done.stdout


def test_the_version_and_its_commit():
    done = expertile_here("--version")
    assert done.returncode == 0 and done.stdout.split()[:2] == ["expertile", __version__]


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (["bench", "--preset", "squars"], "'squares'"),
        (["bench", "--backend", "torch_groupd"], "'torch_grouped'"),
        (["bench", "--skip", "lop"], "'loop'"),
        (["tune", "--backend", "gluon_hoper"], "'gluon_hopper'"),
        (["explain", "--gpu", "H2000"], "'H200'"),
        (["explain", "--op", "atention"], "'attention'"),
        (["impact", "--model", "mixtral"], "'mixtral-8x7b'"),
        (["impact", "--baseline", "ligr"], "'liger'"),
    ],
)
def test_a_mistyped_name_is_answered_with_the_nearest(args, hint):
    done = expertile_here(*args)
    assert done.returncode == 2
    assert f"; did you mean {hint}".lower() in done.stderr.lower() and done.stderr.endswith("?\n"), done.stderr


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
        (["bench", "--preset", "sqares"], "expected .*, got 'sqares'; did you mean 'squares'"),
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
        (["report", "absent.jsonl", "--markdown", "--out", "a.html"], "out, markdown: expected one of them, got more"),
        (["explain", "--tokens", str(10**20)], "tokens: expected tokens · top_k below 2.31, .* got 10*0 · 1"),
    ],
)
def test_a_users_mistake_is_one_line(args, message, tmp_path):
    done = expertile_here(*args, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(message, done.stderr, re.S), done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) <= 3
