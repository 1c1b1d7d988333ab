"""expertile tune on this machine's CPU: a table from a short run, from records, and a check of auto."""

import datetime
import json

import pytest
import typer
from typer.testing import CliRunner

from expertile.cli.tune import tune
from expertile.device import Device
from expertile.lab.race.operator import record_fields
from expertile.lab.race.record import append, read, results_path
from expertile.lab.race.workloads import ragged_m
from tests.lab.records import timed

app = typer.Typer()
app.command("tune")(tune)


def invoke(*words):
    return CliRunner().invoke(app, [str(w) for w in words])


def test_a_short_run_writes_records_and_a_table(tmp_path):
    out, tables = tmp_path / "out", tmp_path / "tables"
    done = invoke("--minutes", 0.2, "--problems", 1, "--backend", "loop", "--out", out, "--tables", tables)
    assert done.exit_code == 0, done.output
    (records,) = out.glob("*/*-tune.jsonl")
    (table,) = tables.glob("*.json")
    assert json.loads(table.read_text())["candidates"] == [["loop", {}]]
    assert "1 problems" in done.output.replace("\n", " ")
    again = invoke("--from-records", records, "--tables", tmp_path / "again")
    assert again.exit_code == 0, again.output
    assert (tmp_path / "again" / table.name).read_text() == table.read_text()


def test_verify_prints_how_often_auto_keeps_up(tmp_path):
    done = invoke("--verify", 1, "--minutes", 0.2, "--backend", "loop", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert "auto is at 0.97 or more of the best on 1 of 1 problems" in done.output
    assert list(tmp_path.glob("*/*-auto.jsonl"))


def test_an_unknown_backend_is_an_error(tmp_path):
    done = invoke("--backend", "abacus", "--out", tmp_path)
    assert isinstance(done.exception, ValueError) and "expected one of" in str(done.exception)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("minutes", [0, -2])
def test_minutes_must_be_positive_and_a_mistake_leaves_the_records_of_the_day(minutes, tmp_path):
    today = results_path(Device.current().slug, "tune", datetime.date.today().isoformat(), root=tmp_path)
    append(today, timed(1e-3))
    done = invoke("--minutes", minutes, "--out", tmp_path)
    assert isinstance(done.exception, ValueError) and "minutes: expected more than 0" in str(done.exception)
    assert len(read(today)) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--verify", 2, "--add", "loop"), "tune: expected at most one of its tasks, got --verify and --add"),
        (("--least-rows", 3), "least-rows: expected with --add alone, got 3 without"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words, says, tmp_path):
    done = invoke(*words, "--out", tmp_path, "--tables", tmp_path)
    assert isinstance(done.exception, ValueError) and says in str(done.exception)


def test_a_table_from_records_is_of_the_chosen_backends(tmp_path):
    about = record_fields(ragged_m("w", "t", (3, 4), 32, 64, "bf16"))
    both = (timed(backend=name, **about) for name in ("loop", "padded_bmm"))
    append(tmp_path / "a.jsonl", *both)
    done = invoke("--from-records", tmp_path / "a.jsonl", "--backend", "loop", "--tables", tmp_path, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    (table,) = tmp_path.glob("*.json")
    assert json.loads(table.read_text())["candidates"] == [["loop", {}]]


def test_records_without_any_are_named(tmp_path):
    (tmp_path / "none.jsonl").touch()
    done = invoke("--from-records", tmp_path / "none.jsonl", "--tables", tmp_path, "--out", tmp_path)
    assert isinstance(done.exception, ValueError) and "records, found none in" in str(done.exception)
    assert "none.jsonl" in str(done.exception)


def test_left_out_needs_a_gpu_with_a_table():
    done = invoke("--left-out", "h200", "--backend", "gluon_hopper")
    assert done.exit_code == 0, done.output
    assert "auto is at 0.97 or more of the best on" in done.output
    none = invoke("--left-out", "a100")
    assert isinstance(none.exception, ValueError) and "expected a GPU with a table, got NVIDIA A100" in str(
        none.exception
    )
