"""docs/notes/ladder.md: its figures come from records, its code from the rungs."""

import re
import textwrap
from pathlib import Path

from expertile.lab.bench.presets import preset
from expertile.ladder import RUNGS
from tests.lab.records import timed, untimed
from tools.pages.ladder import NOT_MEASURED, blocks

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "notes" / "ladder.md"
NAMES = [rung.name for rung in RUNGS]


def records(run="r1", rungs=NAMES, date="2026-11-21", policy="graph"):
    """Rung r (from 1) takes 9 - r ms, the baseline `dense` 0.5 ms."""
    found = []
    for workload in preset("ladder"):
        common = dict(
            workload=f"ladder/{workload.name}",
            shape=workload.shape(),
            dtype=workload.dtype,
            run=run,
            date=date,
            policy=policy,
            flops=1e11,
            bound=4e-4,
        )
        found += [timed((9 - NAMES.index(name) - 1) * 1e-3, backend=name, **common) for name in rungs]
        found += [untimed("unsupported", "needs a GPU", backend=n, **common) for n in NAMES if n not in rungs]
        found.append(timed(5e-4, backend="dense", **common))
    return found


def test_without_records_every_block_says_so():
    texts = blocks([])
    assert texts.keys() == {"table", *NAMES, "report-000"} and set(texts.values()) == {NOT_MEASURED}


def test_figures():
    texts = blocks(records())
    (line,) = [line for line in texts["table"].splitlines() if "3_masked" in line]
    assert line.split("|")[2].strip() == "6,000, 16.7 TFLOP/s, 1.17×"
    assert (
        "NVIDIA H200, 2026-11-21, torch 2.11, triton 3.6, expertile 0.1, CUDA-graph replay, run `r1`" in texts["table"]
    )
    assert "64x1024 16.7 TFLOP/s (6.7 % of the bound, 1.17× the rung below)" in texts["3_masked_pointer"]
    assert "rung below" not in texts["1_naive_loop"]
    assert "On 64x1024, rung four is 1.20× as fast as rung three on NVIDIA H200" in texts["report-000"]
    assert (
        "its expert kernel" not in texts["report-000"] and "4.33× as fast as its generated one" in texts["report-000"]
    )
    assert "they reach 1.33× and 1.60× its speed" in texts["report-000"]


def test_a_rung_without_a_time_says_why():
    texts = blocks(records(rungs=NAMES[:2], policy="eager"))
    assert texts["6_tma"] == "**Measured** on NVIDIA H200: no time. moe-ffn-up: unsupported, needs a GPU"
    assert texts["report-000"] == NOT_MEASURED
    assert "| `6_tma` | unsupported |" in texts["table"]


def test_the_run_with_most_rungs_counts_and_the_latest_of_equals():
    older, newer = records("old"), records("new", date="2026-11-22")
    partial = records("partial", rungs=NAMES[:2], date="2026-11-23")
    assert "run `new`" in blocks([*older, *newer, *partial])["table"]
    assert "run `old`" in blocks([*older, *partial])["table"]
    other = [timed(workload="squares/4x512", run="other", date="2026-11-24")]
    assert blocks(other)["table"] == NOT_MEASURED


def test_the_code_shown_is_the_code_that_runs():
    """Every ```python block of the page stands, but for its indentation, in the file named on the line before it."""
    page = PAGE.read_text()
    shown = re.findall(r"`(src/[\w/]+\.py)`:\n\n```python\n(.*?)```", page, flags=re.S)
    assert len(shown) == page.count("```python") == len(NAMES)
    for file, code in shown:
        lines = [line.strip() for line in textwrap.dedent(code).splitlines()]
        source = [line.strip() for line in (ROOT / file).read_text().splitlines()]
        places = range(len(source) - len(lines) + 1)
        assert any(source[p : p + len(lines)] == lines for p in places), f"{file} no longer reads:\n{code}"
        assert 5 <= len(lines) <= 15
