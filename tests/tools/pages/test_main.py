"""tools.pages: every page is known, up to date by the shipped records, and mistakes are told."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def tool():
    return importlib.import_module("tools.pages.__main__")


def test_every_page_is_what_the_shipped_records_say(tool, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert tool.main(["--check"]) == 0, capsys.readouterr().err


def test_every_page_exists(tool):
    assert all((ROOT / doc).is_file() for doc, _ in tool.PAGES.values())


def test_a_stale_page_is_named_and_left_alone(tool, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    page = tmp_path / "grouped_mm.md"
    text = (ROOT / "docs" / "results" / "grouped_mm.md").read_text()
    page.write_text(text.replace("Geometric mean", "Mean"))
    assert tool.main(["grouped_mm", "--doc", str(page), "--check"]) == 1
    assert "run python -m tools.pages grouped_mm" in capsys.readouterr().err and page.read_text() != text
    assert tool.main(["grouped_mm", "--doc", str(page)]) == 0 and page.read_text() == text


@pytest.mark.parametrize(
    "argv",
    [["nope"], ["--doc", "x.md"], ["moe", "scaling", "--records", "x.jsonl"], ["traffic", "--records", "x.jsonl"]],
)
def test_mistakes_end_with_what_was_expected(tool, argv, capsys):
    with pytest.raises(SystemExit) as end:
        tool.main(argv)
    assert end.value.code == 2 and "expected" in capsys.readouterr().err
