"""The example learns, and its two models agree."""

import json
import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_small_moe.py"
SMALL = "--steps 30 --batch 4 --context 32 --layers 1 --hidden 32 --intermediate 16 --heads 2 --experts 4 --device cpu"


@pytest.fixture(scope="module")
def main():
    return runpy.run_path(str(EXAMPLE))["main"]


def test_both_models_learn_the_same(main, tmp_path, capsys):
    out = tmp_path / "deep" / "curves.json"
    found = main([*SMALL.split(), "--learning-rate", "1e-2", "--out", str(out)])
    assert json.loads(out.read_text()) == found
    ours, theirs = (found["runs"][name] for name in ("expertile", "eager"))
    assert len(ours["losses"]) == 30
    assert sum(ours["losses"][-3:]) / 3 < ours["losses"][0] - 1
    assert found["largest_difference"] < 1e-3
    assert ours["validation"] == pytest.approx(theirs["validation"], abs=1e-3)
    printed = capsys.readouterr().out
    assert "nats per byte" in printed and f"{ours['validation']:.4f}" in printed


def test_the_page_shows_both_curves(main, tmp_path):
    text, out = tmp_path / "text", tmp_path / "curves.html"
    text.write_bytes(b"to be or not to be, " * 100)
    main([*SMALL.replace("30", "3").split(), "--text", str(text), "--out", str(out)])
    page = out.read_text()
    assert page.count("<polyline") == 2 and "expertile" in page and "eager" in page


@pytest.mark.parametrize(
    "options, words",
    [
        (["--out", "curves.txt"], "--out: expected .*html"),
        (["--hidden", "30", "--heads", "4"], "--hidden: .*multiple"),
        (["--steps", "0"], "--steps: expected at least 1, got 0"),
        (["--heads", "0"], "--heads: expected at least 1, got 0"),
        (["--experts", "4", "--top-k", "9"], "--top-k: expected at most --experts 4, got 9"),
        (["--text", "nowhere.txt"], "--text: expected a file, got nowhere.txt"),
    ],
)
def test_wrong_options(main, options, words, capsys):
    with pytest.raises(SystemExit):
        main(options)
    assert re.search(words, capsys.readouterr().err)


def test_too_little_text(main, tmp_path):
    (tmp_path / "text").write_text("short")
    with pytest.raises(SystemExit, match="--text: expected more than 340 bytes, got 5"):
        main([*SMALL.split(), "--text", str(tmp_path / "text")])
