"""The code of the pages runs on a CPU, from top to bottom, as a reader would paste it."""

import ast
from pathlib import Path

import pytest
import torch

import expertile as xt
from tests.docs.code import alone, blocks

__all__ = ["alone"]
DOCS = Path(__file__).parents[2] / "docs"
# The ladder shows pieces of files, which its own test finds there.
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if page.parent.name != "notes" and blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_the_code_of_a_page_runs(page, alone, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    if page.stem == "transformers":
        pytest.importorskip("transformers", minversion="5.7")
    names = {}
    for code in blocks(page):
        exec(code, names)


def test_every_page_of_start_and_guide_has_code_or_commands():
    shown = {page.stem for folder in ("start", "guide") for page in (DOCS / folder).glob("*.md")}
    without = {page.stem for page in DOCS.glob("[sg]*/*.md") if "```" not in page.read_text(encoding="utf-8")}
    assert without == {"concepts"} and without < shown and len(shown) > 10


def test_a_public_name_has_one_path():
    """What `expertile` itself exports is imported from there, in every page and example."""
    texts = {page: "\n".join(blocks(page)) for page in [*PAGES, DOCS.parent / "README.md"]}
    texts |= {file: file.read_text(encoding="utf-8") for file in (DOCS.parent / "examples").glob("*.py")}
    found = {
        (page.name, alias.name)
        for page, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("expertile.")
        for alias in node.names
        if alias.name in xt.__all__
    }
    assert not found


def test_a_block_that_does_not_run_says_why(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```python\na = 1\n```\n\n<!-- not run: needs two GPUs -->\n```python\nb = 2\n```\n")
    assert blocks(page) == ["a = 1\n"]
    page.write_text("<!-- not run -->\n```python\nb = 2\n```\n")
    assert blocks(page) == ["b = 2\n"]
