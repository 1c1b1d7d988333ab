"""Figures in the pages are those of the shipped records, and links lead somewhere."""

import re
from pathlib import Path

import pytest

from expertile.lab.race.record import read, record_files, shown_files
from expertile.lab.report import update_readme
from tools.pages.ladder import update_page

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def _shipped(pattern="*"):
    return [record for path in record_files() if path.match(f"{pattern}.jsonl") for record in read(path)]


def test_readme_shows_the_shipped_records():
    # As `expertile report --readme` does, which writes it.
    shown = [record for path in shown_files() for record in read(path)]
    assert update_readme(ROOT / "README.md", shown, check=True)


def test_ladder_shows_the_shipped_records():
    assert update_page(ROOT / "docs" / "ladder.md", _shipped("*-ladder"), check=True)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_shipped_records_hold_no_time_without_a_right_result():
    records = _shipped()
    assert len(records) > 500
    for record in (r for r in records if r.time_s is not None):
        # Baselines and transfers compute nothing that could be wrong. Kernels of the MoE layer, and its first layers,
        # were judged when records did not keep the errors.
        bare = record.backend in ("dense", "copy") or record.op == "all_to_all"
        early = record.workload.startswith("moe") and record.ci95 is None
        assert record.rel_error is not None or bare or early
        assert (record.status, record.time_s >= record.bound_s) in (("ok", True), ("refused", False))
