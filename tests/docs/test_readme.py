"""README.md is short, and its code runs on a CPU."""

import re
from pathlib import Path

import pytest
import torch

from tests.docs.code import alone, blocks

__all__ = ["alone"]
ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


def test_it_is_short_and_has_one_table_of_figures():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    figures = re.search(r"<!-- expertile:jobs -->(.*)<!-- /expertile:jobs -->", text, re.S)[1]
    assert len([line for line in figures.splitlines() if line.startswith("| ")]) == 2 + 10
    assert not re.search(r"\d×", text.replace(figures, "").replace("1×128", "").replace("128×128", ""))


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_chart_is_there_for_both_themes(theme):
    name = f"docs/results/figures/headline-{theme}.svg"
    assert name in README.read_text(encoding="utf-8") and (ROOT / name).is_file()


def test_the_code_runs(alone, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    *shown, parallel, transformers = blocks(README)
    assert len(shown) == 4 and "register()" in transformers
    names = {}
    for code in shown:
        exec(code, names)
    assert "backend:" in capsys.readouterr().out
    x, layer = names["x"], names["layer"]
    assert names["out"].isfinite().all() and names["h"].equal(x + x)
    exec(parallel, names)
    assert names["y"].equal(layer(x))


def test_register_runs():
    pytest.importorskip("transformers", minversion="5.7")
    exec(blocks(README)[-1], {})
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    assert "expertile" in ALL_EXPERTS_FUNCTIONS
