import json
import re
from html.parser import HTMLParser

import pytest

from expertile.lab.report import html, verdict
from tests.lab.report import samples


class Page(HTMLParser):
    """Elements with attributes, and the text outside scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.parts, self.open = [], [], []
        self.scripts = []
        self.feed(text)
        self.text = re.sub(r"\s+", " ", " ".join(self.parts))

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self.open.append(tag)
            self.scripts.append("")

    def handle_endtag(self, tag):
        if tag in ("script", "style"):
            self.open.pop()

    def handle_data(self, data):
        if self.open:
            self.scripts[-1] += data
        else:
            self.parts.append(data)


def page_of(tmp_path, records, **more):
    return Page(html(records, tmp_path / "new" / "report.html", **more).read_text("utf-8"))


@pytest.fixture(scope="module")
def usual(tmp_path_factory):
    return page_of(tmp_path_factory.mktemp("report"), samples.lab(seed=8, workloads=4))


def test_nothing_is_loaded_from_anywhere(usual):
    for tag, attributes in usual.elements:
        for name in ("src", "href", "data", "action", "poster", "srcset"):
            target = attributes.get(name) or ""
            assert target.startswith(("#", "data:")) or not target, (tag, name, target)
    style = next(text for text in usual.scripts if "--bg" in text)
    assert "url(" not in style
    assert "@import" not in style
    policy = next(a["content"] for _, a in usual.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    assert "http" not in policy


def test_plotly_is_inlined_once(usual):
    assert sum("plotly.js v" in text for text in usual.scripts) == 1


def test_the_verdict_comes_first(usual):
    said = [re.sub(r"\s+", " ", text) for text in verdict(samples.lab(seed=8, workloads=4))]
    assert all(text in usual.text for text in said)
    assert usual.text.index(said[1]) < usual.text.index("At a glance") < usual.text.index("How near the limit")


def test_environment_and_records_are_there(usual):
    for text in ("Driver 1.2.3", "torch 2.13.0", "Power 600 W", "SM clock 1,700 MHz", "Run run-a", "2026-01-02"):
        assert text in usual.text
    assert "CUDA out of memory: 12.0 GB asked for" in usual.text
    assert "block_m=128 num_warps=8" in usual.text
    records = samples.lab(seed=8, workloads=4)
    assert sum(a.get("class") in ("rival", "baseline") for tag, a in usual.elements if tag == "tr") == len(records)


def test_every_chart_has_its_data_and_a_description(usual):
    figures = json.loads(next(text for text in usual.scripts if text.startswith("[{")))
    places = [a for _, a in usual.elements if "data-figure" in a]
    assert sorted(int(a["data-figure"]) for a in places) == list(range(len(figures)))
    assert all(a["role"] == "img" and a["aria-label"] for a in places)


def test_graph_and_eager_can_be_switched(usual):
    assert {a["data-set-policy"] for _, a in usual.elements if "data-set-policy" in a} == {"graph", "eager", "both"}
    assert {a["data-policy"] for tag, a in usual.elements if tag == "figure" and "data-policy" in a} == {
        "graph",
        "eager",
    }


def test_one_policy_needs_no_switch(tmp_path):
    page = page_of(tmp_path, samples.lab(seed=8, workloads=2, policies=("eager",)))
    assert not [a for _, a in page.elements if "data-set-policy" in a]


def test_text_of_records_is_escaped(tmp_path):
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    attribute = '"><b id="evil">'
    records = [
        samples.record("p/" + evil, attribute, device=evil),
        samples.record("p/" + evil, "b", time_s=3e-4, device=evil, config={"x": evil}),
        samples.record("p/" + evil, "c", device=evil, status="wrong", reason=attribute + evil, run="run-a"),
    ]
    page = page_of(tmp_path, records, shipped=[samples.record(evil, run=evil, device=evil)])
    plain = page_of(tmp_path, [samples.record(), samples.record(policy="graph", backend="b")])
    assert "img" not in [tag for tag, _ in page.elements]
    assert not [a for _, a in page.elements if a.get("id") == "evil" or "onerror" in a]
    count = [tag for tag, _ in page.elements].count("script")
    assert count == [tag for tag, _ in plain.elements].count("script")
    assert evil in page.text


def test_runs_stand_apart_and_shipped_ones_are_labelled(tmp_path):
    own = samples.lab(seed=1, workloads=1, backends=("loop",), device="Some CPU", run="own")
    there = samples.lab(seed=2, workloads=1, backends=("loop", "quack"), device="NVIDIA H200", run="there")
    page = page_of(tmp_path, own, shipped=[*there, *own])
    label = "recorded on NVIDIA H200, 2026-01-02, not on this machine"
    assert label in page.text
    figures = page.text.count(label)
    assert figures >= len([a for _, a in page.elements if "data-figure" in a]) / 2
    sections = [a for tag, a in page.elements if tag == "section"]
    assert [a["id"] for a in sections] == ["run-1", "shipped-1"]  # the own run is not shipped again
    assert page.text.index("Recorded elsewhere") > page.text.index("Some CPU")


@pytest.mark.parametrize(
    "records",
    [
        [],
        [samples.record(status="unsupported", reason="needs sm_90")],
        [samples.record(bounded=False, policy="eager", env={"gpu": "Some CPU"})],
        [samples.record(), samples.record(run="run-b")],
    ],
    ids=["nothing", "only unsupported", "no bound, no clocks", "two runs"],
)
def test_sparse_records_still_make_a_page(tmp_path, records):
    page = page_of(tmp_path, records)
    assert all(text in page.text for text in verdict(records) if records)
    assert "None" not in page.text
    assert "nan" not in page.text.lower().split()


def test_the_first_table_sorts_and_leaves_out_what_nobody_can_run(tmp_path):
    found = [samples.record("w/1", name, policy="eager") for name in ("loop", "triton_tma")]
    found += [samples.record("w/1", "quack", policy="eager", status="unsupported", reason="needs a GPU")]
    page = html(found, tmp_path / "page.html").read_text()
    glance = page[page.index('<table class="glance sortable">') :]
    glance = glance[: glance.index("</table>")]
    assert glance.count("<button") == 4 and "loop" in glance and "quack" not in glance
    assert glance.count("data-sort=") == 3  # the bound and two times
    assert 'data-save="csv"' in page and 'data-save="json"' in page
