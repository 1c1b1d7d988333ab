"""docs/results/transformers.md: its figures are those of the shipped run."""

import importlib
import json
from pathlib import Path

import pytest

from expertile.device import Device
from tools.pages.transformers import NOT_MEASURED, blocks, shipped_transformers, update_page

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "results" / "transformers.md"
H200 = Device.by_name("h200")
EMPTY = "<!-- expertile:transformers layers -->\n<!-- /expertile:transformers layers -->\n"


def layer(tokens, seconds, both=False, policy="eager", model="Small", **more):
    """A made-up part whose bound on an H200 is that of 4.8 GB: 1 ms."""
    return {
        "part": "layer",
        "model": model,
        "tokens": tokens,
        "both": both,
        "policy": policy,
        "H": 64,
        "I": 32,
        "E": 8,
        "k": 2,
        "flops": 1e9,
        "nbytes": H200.memory_bps * 1e-3,
        "seconds": seconds,
        "rel_error": {name: 0.004 + 0.001 * (name != "expertile") for name in seconds},
        **more,
    }


def written(tmp_path, *parts):
    path = tmp_path / "2026-01-02.jsonl"
    path.write_text("".join(json.dumps(part) + "\n" for part in parts))
    return path


@pytest.fixture
def run(tmp_path):
    return written(
        tmp_path,
        {"part": "run", "transformers": "5.17.0", "torch": "2.11.0"},
        layer(2048, {"expertile": 4e-3, "grouped_mm": 6e-3}),
        layer(1, {"expertile": 2e-3, "grouped_mm": 3e-3, "batched_mm": 1.5e-3}),
        layer(1, {"expertile": 2e-3, "grouped_mm": 2.5e-3, "batched_mm": "cannot be captured"}, policy="graph"),
        layer(4096, {"expertile": 5e-3, "grouped_mm": 1e-2}, both=True),
        {"part": "failed", "of": "layer", "model": "Small", "tokens": 16, "reason": "?"},
        layer(16, {"expertile": "wrong: |x|", "grouped_mm": 1e-3}, model="Other"),
        layer(17, {"expertile": 1e-3}, model="Other"),
    )


def test_rows_are_set_beside_their_bounds_and_the_others(run):
    text = blocks(run, H200)["layers"]
    assert text.startswith(
        "NVIDIA H200, transformers 5.17.0, torch 2.11.0, 2026-01-02: "
        "`results/nvidia-h200/transformers/2026-01-02.jsonl`."
    )
    assert "**Small**, H = 64, I = 32, E = 8, k = 2" in text
    rows = [line for line in text.splitlines() if line.startswith("| ") and "1.00 | memory" in line]
    assert rows == [
        "| 1 | 1.00 | memory | 2.00 | 50 % | 3.00 | 1.50× | 1.50 | 0.75× |",
        "| 1, CUDA graph | 1.00 | memory | 2.00 | 50 % | 2.50 | 1.25× | – | – |",
        "| 2048 | 1.00 | memory | 4.00 | 25 % | 6.00 | 1.50× | – | – |",
        "| 4096, with backward | 1.00 | memory | 5.00 | 20 % | 10.0 | 2.00× | – | – |",
        "| 17 | 1.00 | memory | 1.00 | 100 % |",
    ]


def test_losses_are_in_the_summary_and_reasons_beside_the_tables(run):
    text = blocks(run, H200)["layers"]
    assert "0.75× to 1.50× (forward, called from Python), 1.25× to 1.25× (forward, in a CUDA graph) and 2.00×" in text
    assert "4.0e-03 of expertile and 5.0e-03 of the others" in text
    assert "1, CUDA graph: `batched_mm` has no time: cannot be captured" in text
    assert r"16: `expertile` has no time: wrong: \|x\|" in text


def test_without_figures_it_says_so(tmp_path):
    path = written(tmp_path, {"part": "run"}, layer(1, {"expertile": "out of memory", "grouped_mm": 1.0}))
    assert blocks(None, H200)["layers"] == blocks(path, H200)["layers"] == NOT_MEASURED


def test_the_newest_file_is_shipped(tmp_path):
    folder = tmp_path / "gpu" / "transformers"
    folder.mkdir(parents=True)
    assert shipped_transformers("gpu", tmp_path) is None
    for name in ("2026-01-02.jsonl", "2026-01-10.jsonl", "notes.jsonl"):
        (folder / name).touch()
    assert shipped_transformers("gpu", tmp_path) == folder / "2026-01-10.jsonl"


def test_the_page_shows_the_shipped_run():
    shipped = shipped_transformers(H200.slug)
    assert update_page(PAGE, shipped, H200, check=True), "run python -m tools.pages transformers"


def test_the_tool_fills_a_page(tmp_path, run, capsys):
    tool = importlib.import_module("tools.pages.__main__")
    page = tmp_path / "transformers.md"
    page.write_text(EMPTY)
    arguments = ["transformers", "--records", str(run), "--doc", str(page)]
    assert tool.main([*arguments, "--check"]) == 1 and "not what the records say" in capsys.readouterr().err
    assert page.read_text() == EMPTY
    assert tool.main(arguments) == 0 and tool.main([*arguments, "--check"]) == 0
