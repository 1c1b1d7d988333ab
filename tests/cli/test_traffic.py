"""explain --op: what a user sees of an operator's traffic."""

import io
import re

import pytest
from rich.console import Console

from expertile.cli.traffic import OPERATORS, measured_table, records_in, show_traffic, subject_of
from expertile.device import Device
from expertile.lab.race.record import append
from expertile.lab.traffic import formulas
from expertile.lab.traffic.explain import explain_subject
from tests.cli.test_cli import expertile, expertile_here
from tests.lab.records import timed
from tests.lab.traffic.test_measured import ENV, SOFTMAX, WAYS, measure, two_kernels

H200 = Device.by_name("h200")


def printed(op, given=None, dtype="bf16", measured=False, records=None):
    out = io.StringIO()
    console = Console(file=out, width=160, force_terminal=False)
    show_traffic(explain_subject(subject_of(op, given or {}, dtype), H200, records or []), measured, console)
    return out.getvalue()


@pytest.mark.parametrize("op", formulas())
def test_every_operator_is_explained(op):
    text = printed(op)
    assert "bound:" in text and "NVIDIA H200" in text and "no record of this call" in text
    for way in formulas()[op].ways(subject_of(op, {}, "bf16"), H200):
        assert way.name in text


def test_the_figures_of_a_softmax():
    text = printed("softmax", {"rows": 8192, "cols": 8192}, "fp32")
    assert "537 MB" in text and "112 µs (memory)" in text
    assert re.search(r"unfused\W+5\W+1,342\W+805", text)
    assert "4.00×" in text and "SoftMax.cu" in text


def test_options_become_dimensions():
    attention = subject_of("attention", {"seq_len": 100, "heads": 8}, "bf16")
    assert (attention["q_len"], attention["k_len"], attention["heads"], attention["kv_heads"]) == (100, 100, 8, 8)
    crossed = subject_of("attention", {"seq_len": 100, "k_len": 50, "heads": 8, "kv_heads": 2}, "bf16")
    assert (crossed["k_len"], crossed["kv_heads"]) == (50, 2)
    assert subject_of("laplacian", {"cols": 7, "rows": 5}, "fp32")["columns"] == 7


def test_attention_says_which_backend_and_why():
    assert '"auto" takes ' in printed("attention", {"seq_len": 512})


def test_records_are_shown_with_their_share_of_the_bound():
    shape = {"rows": 8192, "cols": 8192}
    held = timed(2e-4, op="softmax", dtype="fp32", shape=shape, backend="expertile")
    text = printed("softmax", shape, "fp32", records=[held])
    assert "achieved: expertile (graph): 200 µs, 2.68 TB/s, 56 % of the bound" in text


def test_measured_without_a_gpu_or_ncu_is_a_sentence():
    text = printed("add_scalar", {"elements": 1000}, measured=True)
    assert re.search(r"not counted: .+\.", text) or "by formula" in text


def test_model_and_count_side_by_side():
    records = list(measure(SOFTMAX, WAYS, ENV, "run", two_kernels, has_gpu=True))
    out = io.StringIO()
    Console(file=out, width=160, force_terminal=False).print(measured_table(records))
    text = out.getvalue()
    assert text.count("by formula") == 2 and "2 / 4" in text and "2 / 1" in text
    assert re.search(r"torch\W+2 / 2\W+1\.1e-05\W+4\.19", text), text


def test_own_records(tmp_path):
    held = timed(1e-3)
    append(tmp_path / "gpu" / "2026-11-21-x.jsonl", held)
    assert records_in(tmp_path) == [held] == records_in(tmp_path / "gpu" / "2026-11-21-x.jsonl")
    assert records_in(None) is None
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        records_in(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="records: expected record files"):
        records_in(tmp_path / "empty")


def test_the_command_for_an_operator():
    done = expertile("explain", "--op", "layer_norm", "--rows", "16384", "--cols", "768", "--gpu", "h200")
    assert done.returncode == 0, done.stderr
    assert "layer_norm_kernel.cu" in done.stdout and "bound:" in done.stdout


def test_the_command_for_a_grouped_product_adds_traffic_to_what_it_said():
    arguments = ("explain", "--gpu", "h200", "--tokens", "2048", "--groups", "8", "-k", "512", "-n", "1024")
    plain, more = expertile_here(*arguments), expertile_here(*arguments, "--op", "grouped_mm")
    assert plain.returncode == more.returncode == 0, more.stderr
    head = plain.stdout.split("NVIDIA H200 is not this machine")[0].strip().splitlines()
    assert all(line in more.stdout for line in head)
    assert "padded bmm" in more.stdout and "padded bmm" not in plain.stdout


@pytest.mark.parametrize(
    "args, message",
    [
        (("--op", "conv"), f"op: expected one of {', '.join(OPERATORS)}, got 'conv'"),
        (("--rows", "5"), "rows: expected with --op"),
        (("--measured",), "measured: expected with --op"),
        (("--op", "softmax", "--tokens", "4"), "tokens: expected without --op or with --op grouped_mm"),
        (("--op", "softmax", "--heads", "4"), "--heads: expected --rows, --cols for softmax, got --heads"),
        (("--op", "softmax", "--rows", "0"), "rows: expected 1 or more, got 0"),
        (("--op", "grouped_mm", "--rows", "8"), "rows: expected with --op"),
        (("--op", "softmax", "--records", "nowhere"), "records: nowhere does not exist"),
    ],
)
def test_a_users_mistake_is_one_line(args, message, tmp_path):
    done = expertile_here("explain", "--gpu", "h200", *args, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
