"""impact: what the command prints, and that its lines can be recomputed."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from expertile.cli.impact import arithmetic, show
from expertile.lab.race.record import append
from tests.cli.test_cli import expertile, expertile_here
from tests.lab.report.test_impact import PAIR, bert


def printed(found):
    out = io.StringIO()
    show(found, Console(file=out, width=200, force_terminal=False))
    return out.getvalue()


def number(text):
    return float(text.replace(",", ""))


def test_the_lines_recompute():
    lines = arithmetic(bert(PAIR, price_per_gpu_hour=2.5))
    per_pass = re.search(r"saved per pass: ([\d.,]+) ms = ([\d.,]+) ms of ([\d.,]+) ms", lines[0])
    per_query = re.search(r"([\d.,]+) ms / (\d+) queries = ([\d.,]+) µs", lines[1])
    day = re.search(
        r"([\d.,]+) queries/s x 86,400 s x ([\d.,]+) µs = ([\d.,]+) GPU-s; / 3600 = ([\d.,]+) GPU", lines[2]
    )
    price = re.search(r"([\d.,]+) GPU-hours x ([\d.,]+) = ([\d.,]+) a day", lines[3])
    assert number(per_pass[1]) == number(per_pass[2]) == 25 * 0.03
    assert number(per_query[1]) * 1e3 / number(per_query[2]) == pytest.approx(number(per_query[3]))
    assert number(day[1]) * 86400 * number(day[2]) * 1e-6 == pytest.approx(number(day[3]), rel=1e-5)
    assert number(day[3]) / 3600 == pytest.approx(number(day[4]), rel=1e-5)
    assert number(price[1]) * number(price[2]) == pytest.approx(number(price[3]), rel=1e-5)


def test_no_price_is_invented():
    assert not any("price" in line for line in arithmetic(bert(PAIR)))


def test_what_is_left_out_is_said():
    text = printed(bert(PAIR))
    assert "left out: attention" in text and "layer_norm" in text and "32 queries x 512 tokens" in text
    assert "Nothing can be said without records." in printed(bert([]))


def test_scaled_times_are_marked():
    assert "not measured at this size" in printed(bert(PAIR, batch=8, scale=True))
    assert "not measured at this size" not in printed(bert(PAIR))


def test_a_loss_is_called_one():
    slower = [
        PAIR[0].__class__(**{**r.__dict__, "backend": b}) for r, b in zip(PAIR, ("expertile", "torch"), strict=True)
    ]
    assert "more" in arithmetic(bert(slower))[0]


def test_the_command(tmp_path):
    append(tmp_path / "own.jsonl", *PAIR)
    options = ("--records", tmp_path / "own.jsonl", "--qps", "1000", "--price-per-gpu-hour", "3")
    done = expertile("impact", "--model", "bert-base", *options, "--missing", tmp_path / "missing.toml")
    assert done.returncode == 0, done.stderr
    assert "GPU-hours" in done.stdout and "a day" in done.stdout and (tmp_path / "missing.toml").is_file()


def test_the_shipped_records_serve_the_mixture_models():
    done = expertile_here("impact", "--model", "deepseek-v3")
    assert done.returncode == 0 and "experts, down" in done.stdout and "GPU-hours" in done.stdout


@pytest.mark.parametrize(
    "args, message",
    [
        (("--model", "gpt-5"), "model: expected one of bert-base"),
        (("--gpu", "abacus"), "gpu: no known device in 'abacus'"),
        (("--policy", "warm"), "policy: expected graph or eager, got 'warm'"),
        (("--records", "nowhere"), "records: nowhere does not exist"),
    ],
)
def test_a_users_mistake_is_one_line(args, message, tmp_path):
    done = expertile_here("impact", *args, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr, done.stdout + done.stderr
