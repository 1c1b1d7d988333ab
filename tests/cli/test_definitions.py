"""bench --definition and report --traces, as a user types them."""

import json

import pytest

from tests.cli.test_cli import expertile, expertile_here
from tests.lab.flashinfer import datasets


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """One real bench of a folder with two definitions that are served, each with a workload, and two that are not."""
    folder = tmp_path_factory.mktemp("definitions")
    moe = datasets.add(folder / "set", datasets.moe("moe_fp8_block_scale_renorm", 8), ({"T": 9}, {}))
    gemm = datasets.add(folder / "set", datasets.gemm(), ({"M": 5}, {}))
    datasets.add(folder / "set", datasets.gemm("rope_d64", "rope"), ({"M": 5}, {}))
    datasets.add(folder / "set", datasets.gemm("rope_d128", "rope"), ({"M": 5}, {}))
    done = expertile("bench", "--definition", "set", "--quick", "--no-html", "--out", "out", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, (moe, gemm), " ".join(done.stdout.split())


def test_each_definition_has_records_and_others_a_sentence(bench):
    folder, names, printed = bench
    for name in names:
        (path,) = folder.glob(f"out/*/*-{name}.jsonl")
        found = [json.loads(line) for line in path.read_text().splitlines()]
        assert {r["backend"] for r in found if r["status"] == "ok"} >= {"reference", "expertile", "copy"}
        assert all(r["workload"].startswith(f"{name}/") and r["shape"]["uuid"] for r in found)
    assert "rope_d128 is left out: expertile serves gemm, grouped_gemm, moe, not rope." in printed
    assert "1 more are left out for the same reasons." in printed


def test_compare_and_report_read_them(bench):
    folder, (moe, _), _ = bench
    (path,) = folder.glob(f"out/*/*-{moe}.jsonl")
    assert expertile_here("compare", path, path).returncode == 0
    done = expertile_here("report", path)
    assert done.returncode == 0 and "expertile-arranged" in done.stdout


def test_traces_are_added_to_the_folder(bench):
    folder, names, _ = bench
    args = ("report", *folder.glob("out/*/*.jsonl"), "--traces", folder / "set")
    done = expertile_here(*args)
    assert done.returncode == 0 and "Traces: 2 new" in done.stdout and all(name in done.stdout for name in names)
    assert "Left out: 1 of weights rearranged before the call" in done.stdout
    assert "Traces: 0 new" in expertile_here(*args).stdout
    paths = [path for path in (folder / "set/traces").rglob("*.jsonl") if path.stem in names]
    for trace in (json.loads(path.read_text()) for path in paths):
        performance = trace["evaluation"]["performance"]
        ratio = performance["reference_latency_ms"] / performance["latency_ms"]
        assert performance["speedup_factor"] == pytest.approx(ratio)
    assert len(paths) == 2


@pytest.mark.parametrize(
    "more, message",
    [
        (("--preset", "cpu"), "definition: expected no presets"),
        (("--only", "rope*"), "expected one with workloads in set that expertile serves and --only names (rope*), got"),
        (("--backend", "loop"), "backend: expected some of reference, expertile"),
    ],
)
def test_mistakes_are_one_sentence(bench, more, message):
    done = expertile_here("bench", "--definition", "set", "--no-html", *more, cwd=bench[0])
    assert done.returncode == 2 and message in done.stderr


def test_help_says_that_references_are_run():
    assert "RUNS the Python references" in " ".join(expertile_here("bench", "--help").stdout.replace("│", " ").split())
