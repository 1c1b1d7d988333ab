"""bench, report and compare of operators other than grouped_mm, as a user types them."""

import json

import pytest

from tests.cli.test_cli import expertile, expertile_here


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """One real, tiny bench on this machine's CPU: rows of softmax, and their memory."""
    folder = tmp_path_factory.mktemp("operators")
    tables = [
        f'[[workload]]\nname = "rows-{rows}"\nop = "softmax"\ndtype = "fp32"\ndims = {{ rows = {rows}, cols = 64 }}\n'
        for rows in (1024, 2048, 4096)
    ]
    (folder / "bench.toml").write_text('rounds = 5\nmemory = true\nskip = ["torch.compile"]\n' + "".join(tables))
    done = expertile("bench", "--config", "bench.toml", "--out", "records", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def records(folder, suffix):
    (path,) = folder.glob(f"records/*/*-{suffix}.jsonl")
    return path, [json.loads(line) for line in path.read_text().splitlines()]


def test_every_rival_has_a_row_and_copy_stands_beside(bench):
    folder, printed = bench
    found = {(r["workload"], r["backend"]): r for r in records(folder, "custom")[1]}
    assert {name for name, _ in found} == {"file/rows-1024", "file/rows-2048", "file/rows-4096"}
    for backend in ("expertile", "torch", "copy"):
        assert found["file/rows-1024", backend]["status"] == "ok"
    assert found["file/rows-1024", "expertile"]["shape"] == {"rows": 1024, "cols": 64}
    assert found["file/rows-1024", "quack"]["status"] == "unsupported"
    assert "rows-4096" in printed and "copy: speed of light (same bytes moved)" in printed


def test_memory_is_a_file_of_its_own_and_a_chart_of_the_report(bench):
    folder, _ = bench
    _, found = records(folder, "custom-memory")
    ours = {r["shape"]["rows"]: r["value"] for r in found if r["backend"] == "expertile"}
    assert set(ours) == {1024, 2048, 4096} and all(n * 64 * 4 <= peak for n, peak in ours.items())
    (page,) = folder.glob("records/*/*.html")
    assert "Peak memory of a call" in page.read_text()


def test_report_takes_both_kinds_of_files(bench, tmp_path):
    folder, _ = bench
    done = expertile_here("report", *folder.glob("records/*/*.jsonl"), "--out", tmp_path / "r.html")
    assert done.returncode == 0 and "rows-2048" in done.stdout
    text = (tmp_path / "r.html").read_text()
    assert "Rate against size: softmax, fp32" in text and "Peak memory of a call" in text


def test_compare_with_a_part_is_no_regression(bench, tmp_path):
    folder, _ = bench
    path, found = records(folder, "custom")
    part = tmp_path / "part.jsonl"
    part.write_text("".join(json.dumps(r) + "\n" for r in found if r["workload"] != "file/rows-2048"))
    done = expertile_here("compare", path, part)
    assert done.returncode == 0, done.stdout
    assert "only in the old records, not compared: file/rows-2048 (fp32, eager)" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--preset", "softmax-v100", "--backend", "loop"], "backend: expected some of .*expertile.*, got loop"),
        (["--preset", "softmax-v100", "--candidate", "mine.py:fn"], "candidate: expected a preset of grouped products"),
        (
            ["--preset", "cpu", "--candidate", "mine.py:gn"],
            "candidate mine.py:gn cannot be loaded: mine.py has no 'gn'",
        ),
        (
            ["--preset", "add-scalar", "--preset", "cpu", "--candidate", "bad.py:fn"],
            "candidate bad.py:fn cannot be loaded: importing bad.py failed",
        ),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_measured(args, message, tmp_path):
    (tmp_path / "mine.py").write_text("def fn(a, b, offs):\n    return a\n")
    (tmp_path / "bad.py").write_text("import nothing_of_that_name\n")
    done = expertile_here("bench", *args, cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("expertile: ") and message.split(".*")[0] in line
    assert not list(tmp_path.glob("out/*/*.jsonl"))


def test_whole_models_are_a_preset_whose_candidates_are_chosen_by_name(tmp_path):
    pytest.importorskip("transformers", minversion="5.7")
    folder = tmp_path / "records"
    done = expertile_here("bench", "--preset", "end-to-end-train", "--backend", "grouped_mm", "--out", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "small-Qwen3-30B-A3B-T32  grouped_mm: " in done.stdout and " tokens/s" in done.stdout
    _, found = records(tmp_path, "end-to-end-train")
    assert [(r["backend"], r["metric"], r["status"]) for r in found] == [
        ("grouped_mm", "tokens/s", "ok"),
        ("grouped_mm", "peak_bytes", "ok"),
    ]
