"""Links lead somewhere, every page has its place, and shipped records hold what the pages promise."""

import re
from pathlib import Path

import pytest

from expertile.lab.operators import operators, presets
from expertile.lab.race.record import read
from tests.lab.records import record_files

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        there = (page.parent / target).resolve()
        assert there.exists(), f"{page.name} links to {target}"
        # What lies outside of docs/ is not on the site.
        assert DOCS not in page.parents or DOCS in there.parents, f"{page.name} links to {target}"


def test_every_page_has_its_place_in_the_navigation():
    named = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2])
    assert sorted(named) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", sorted(DOCS.glob("*/*.md")), ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_page_begins_with_what_how_and_limits(page):
    """Each in the first screen, in that order."""
    lead = page.read_text(encoding="utf-8").partition("\n## ")[0]
    places = [lead.find(f"**{word}.**") for word in ("What", "How", "Limits")]
    assert -1 not in places and places == sorted(places)


def test_shipped_records_hold_no_time_without_a_right_result():
    records = [record for path in record_files() for record in read(path)]
    assert len(records) > 500
    for record in (r for r in records if r.time_s is not None):
        # Baselines and transfers compute nothing that could be wrong. Kernels of the MoE layer, and its first layers,
        # were judged when records did not keep the errors.
        bare = record.backend in ("dense", "copy") or record.op == "all_to_all"
        early = record.workload.startswith("moe") and record.ci95 is None
        assert record.rel_error is not None or bare or early
        assert (record.status, record.time_s >= record.bound_s) in (("ok", True), ("refused", False))


def test_the_racing_page_names_presets_and_rivals_that_they_have():
    guide, reference = ((DOCS / p).read_text(encoding="utf-8") for p in ("guide/race.md", "reference/backends.md"))
    rows = re.findall(r"^\| (`.*?) \| .*? \| (.*?) \|$", guide.partition("## Specialised rivals")[2], re.M)
    found, families = set(), presets()
    for named, rivals in rows:
        for preset in re.findall(r"`(.+?)`", named):
            theirs = {r.name for w in families[preset]() for r in operators()[w.op].rivals if r.peer}
            assert set(re.findall(r"`(.+?)`", rivals)) <= theirs, preset
            found |= theirs
    assert len(rows) >= 6
    listed = re.findall(r"^\| `([\w.-]+)", reference.partition("## Rivals in the lab")[2], re.M)
    assert len(listed) >= 8 and set(listed) <= found
