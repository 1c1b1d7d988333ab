"""impact: what the command prints, and that its lines can be recomputed."""

from __future__ import annotations

import re

import pytest

from expertile.cli.impact import told
from expertile.lab.race.record import append
from tests.cli.test_cli import expertile, expertile_here
from tests.lab.report.test_impact import PAIR, bert, norm


def numbers(pattern, line):
    return [float(text) for text in re.search(pattern, line).groups()]


def test_the_lines_recompute():
    operator, _, per_pass, per_query, day, price = told(bert(PAIR), 32, 1000.0, 2.5)
    calls, theirs, ours = numbers(r"(\d+) calls x \(([\d.]+) µs torch - ([\d.]+) µs expertile\)", operator)
    saved, whole = numbers(r"saved per pass: ([\d.]+) ms of ([\d.]+) ms", per_pass)
    assert saved * 1e3 == pytest.approx(calls * (theirs - ours)) and whole * 1e3 == pytest.approx(calls * theirs)
    shared, queries, each = numbers(r"([\d.]+) ms / (\d+) queries = ([\d.]+) µs", per_query)
    assert shared == saved and each == pytest.approx(saved * 1e3 / queries)
    qps, seconds, us, hours = numbers(r"([\d.]+) queries/s x (\d+) s x ([\d.]+) µs / 3600 = ([\d.]+)", day)
    assert us == each and hours == pytest.approx(qps * seconds * us * 1e-6 / 3600, rel=1e-5)
    assert numbers(r"([\d.]+) GPU-hours x ([\d.]+) = ([\d.]+)", price) == [hours, 2.5, pytest.approx(2.5 * hours)]


def test_report_004s_own_figures_by_its_own_arithmetic():
    """It saves 24 x 39 µs in a pass of 32 sequences and multiplies by 1000 inferences a second: one inference of its is
    a pass of 32 queries."""
    lines = told(bert([norm("torch", 0.170e-3), norm("expertile", 0.131e-3)]), 32, 32 * 1000.0)
    (saved,) = numbers(r"saved per pass: ([\d.]+) ms", lines[2])
    (hours,) = numbers(r"= ([\d.]+) GPU-hours", lines[4])
    assert saved * 24 / 25 == pytest.approx(0.94, rel=0.01) and hours * 24 / 25 == pytest.approx(22.6, rel=0.01)


def test_a_slower_kernel_costs_and_no_price_is_invented():
    lines = told(bert([norm("torch", 20e-6), norm("expertile", 50e-6)]), 32, 1000.0)
    assert "saved per pass: -0.75 ms" in lines[2] and not any("price" in line for line in lines)


def test_what_is_left_out_is_said():
    assert any(line.startswith("left out: attention (batch 32") for line in told(bert(PAIR), 32, 1.0))
    assert told(bert([]), 32, 1.0)[-1] == "Nothing can be said without records."


def test_the_command(tmp_path):
    append(tmp_path / "own.jsonl", *PAIR)
    options = ("--records", tmp_path / "own.jsonl", "--qps", "1000", "--price-per-gpu-hour", "3")
    done = expertile("impact", "--model", "bert-base", *options)
    assert done.returncode == 0, done.stderr
    assert "32 queries x 512 tokens" in done.stdout and "GPU-hours" in done.stdout and "a day" in done.stdout


def test_the_shipped_records_serve_bert_and_the_mixture_models():
    for model, operator in (("bert-base", "layer_norm"), ("deepseek-v3", "grouped_mm")):
        done = expertile_here("impact", "--model", model)
        assert done.returncode == 0 and f"\n{operator} (" in done.stdout and "GPU-hours" in done.stdout


@pytest.mark.parametrize(
    "args, message",
    [
        (("--model", "gpt-5"), "model: expected one of bert-base"),
        (("--gpu", "abacus"), "gpu: no known device in 'abacus'"),
        (("--policy", "warm"), "policy: expected one of graph, eager, got 'warm'"),
        (("--records", "nowhere"), "records: nowhere does not exist"),
    ],
)
def test_a_users_mistake_is_one_line(args, message, tmp_path):
    done = expertile_here("impact", *args, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr, done.stdout + done.stderr
