"""impact: what the command prints, and that its lines can be recomputed."""

import math
import re

import pytest

from expertile.cli.impact import told
from expertile.lab.race.record import append
from tests.cli.test_cli import expertile, expertile_here
from tests.lab.report.test_impact import PAIR, bert, norm


def numbers(pattern, line):
    return [float(text) for text in re.search(pattern, line).groups()]


def test_the_lines_recompute_within_their_errors():
    operator, _, per_pass, per_query, day, price, note = told(bert(PAIR), 32, 1000.0, 2.5)
    assert "25 calls x (50.0 ± 0.5 µs torch - 20.0 ± 0.2 µs expertile)" in operator
    saved, half, whole = numbers(r"saved per pass: ([\d.]+) ± ([\d.]+) ms of ([\d.]+) ms", per_pass)
    assert saved == pytest.approx(25 * 30e-3, abs=half) and whole == pytest.approx(25 * 50e-3)
    assert half == pytest.approx(25 * math.hypot(0.5e-3, 0.2e-3), abs=0.005)
    shared, queries, each, error = numbers(r"([\d.]+) ± [\d.]+ ms / (\d+) queries = ([\d.]+) ± ([\d.]+) µs", per_query)
    assert shared == saved and each == pytest.approx(saved * 1e3 / queries, abs=error)
    pattern = r"([\d.]+) queries/s x (\d+) s x ([\d.]+) ± [\d.]+ µs / 3600 = ([\d.]+) ± ([\d.]+)"
    qps, seconds, us, hours, error = numbers(pattern, day)
    assert us == each and hours == pytest.approx(qps * seconds * us * 1e-6 / 3600, abs=error)
    priced = numbers(r"([\d.]+) ± [\d.]+ GPU-hours x ([\d.]+) = ([\d.]+) ± ([\d.]+)", price)
    assert priced[:2] == [hours, 2.5] and priced[2] == pytest.approx(2.5 * hours, abs=priced[3])
    assert note.startswith("±")


@pytest.mark.parametrize(
    ("spread", "shown"), [(0.001, "50.00 ± 0.05"), (0.03, "50 ± 2"), (0.4, "50 ± 20"), (0.0, "50 µs torch")]
)
def test_a_time_has_the_digits_that_its_error_allows(spread, shown):
    assert shown in told(bert([norm("torch", 50e-6, spread=spread), PAIR[1]]), 32, 1.0)[0]


def test_report_004s_own_figures_by_its_own_arithmetic():
    """It saves 24 x 39 µs in a pass of 32 sequences and multiplies by 1000 inferences a second: one inference of its is
    a pass of 32 queries."""
    lines = told(
        bert([norm("torch", 0.170e-3, spread=5e-4), norm("expertile", 0.131e-3, spread=5e-4)]), 32, 32 * 1000.0
    )
    (saved,) = numbers(r"saved per pass: ([\d.]+) ± [\d.]+ ms", lines[2])
    (hours,) = numbers(r"= ([\d.]+) ± [\d.]+ GPU-hours", lines[4])
    assert saved * 24 / 25 == pytest.approx(0.94, rel=0.01) and hours * 24 / 25 == pytest.approx(22.6, rel=0.01)


def test_a_slower_kernel_costs_and_no_price_is_invented():
    lines = told(bert([norm("torch", 20e-6), norm("expertile", 50e-6)]), 32, 1000.0)
    assert "saved per pass: -0.75 ± 0.01 ms" in lines[2] and not any("price" in line for line in lines)


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


@pytest.mark.parametrize("option", ["--qps", "--price-per-gpu-hour"])
def test_a_rate_or_price_that_is_no_number_is_refused(option):
    run = expertile("impact", option, "inf")
    assert run.returncode == 2 and f"{option}: expected a finite number, got inf" in run.stderr
