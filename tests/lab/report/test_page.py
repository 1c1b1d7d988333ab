import base64
import json
import re
import shutil
import subprocess
import zlib
from html import unescape
from html.parser import HTMLParser

import pytest

from expertile.lab.report.page import html
from expertile.lab.report.verdict import verdict
from tests.lab.report import samples
from tools.pages.shapes import outlines

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


class Page(HTMLParser):
    """Elements with attributes, and the text outside scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.parts, self.open = [], [], []
        self.scripts = []
        self.feed(text)
        self.text = re.sub(r"\s+", " ", " ".join(self.parts))
        packed = re.search('id="data">(.*?)</script>', text)
        self.data = json.loads(zlib.decompress(base64.b64decode(packed[1])))

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


class Drawn(HTMLParser):
    """Elements, and the values of their attributes."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.values = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.values += [value or "" for _, value in attrs]


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


def test_the_verdict_comes_first(usual):
    said = [re.sub(r"\s+", " ", text) for text in verdict(samples.lab(seed=8, workloads=4))]
    assert all(text in usual.text for text in said)
    assert usual.text.index(said[1]) < usual.text.index("At a glance") < usual.text.index("How near the limit")


def test_environment_and_records_are_there(usual):
    for text in ("Driver 1.2.3", "torch 2.13.0", "Power 600 W", "SM clock 1,700 MHz", "Run run-a", "2026-01-02"):
        assert text in usual.text
    assert "CUDA out of memory: 12.0 GB asked for" in usual.text
    records = samples.lab(seed=8, workloads=4)
    assert len(usual.data["rows"]) == len(records)
    assert all(len(row) == len(usual.data["columns"]) + 1 for row in usual.data["rows"])
    assert any("block_m=128 num_warps=8" in row for row in usual.data["rows"])


def test_every_chart_has_its_data_and_a_description(usual):
    places = [a for _, a in usual.elements if "data-figure" in a]
    assert sorted(int(a["data-figure"]) for a in places) == list(range(len(usual.data["figures"])))
    assert all(a["role"] == "img" and a["aria-label"] for a in places)
    for mark in (mark for figure in usual.data["figures"] for mark in figure["marks"]):
        assert len(mark["x"]) == len(mark["y"]) == len(mark.get("rows") or mark.get("notes") or mark["x"])
        assert all(usual.data["rows"][row][1] == mark["backend"] for row in mark.get("rows", ()))
        assert mark.get("symbol", "stroke") in {*outlines(), "stroke"}


def test_graph_and_eager_can_be_switched(usual):
    assert {a["data-set-policy"] for _, a in usual.elements if "data-set-policy" in a} == {"graph", "eager", "both"}
    assert {a["data-policy"] for tag, a in usual.elements if tag == "figure" and "data-policy" in a} == {
        "graph",
        "eager",
    }


def test_one_policy_needs_no_switch(tmp_path):
    page = page_of(tmp_path, samples.lab(seed=8, workloads=2, policies=("eager",)))
    assert not [a for _, a in page.elements if "data-set-policy" in a]


def test_the_policy_that_was_measured_here_is_selected(tmp_path):
    own = samples.lab(seed=8, workloads=2, policies=("eager",), run="own")
    page = page_of(tmp_path, own, shipped=samples.lab(seed=2, workloads=1, run="there"))
    assert [
        a["data-set-policy"] for _, a in page.elements if a.get("aria-pressed") == "true" and "data-set-policy" in a
    ] == ["eager"]
    assert [a["data-policy"] for tag, a in page.elements if tag == "html"] == ["eager"]


def test_links_to_runs_alike_in_gpu_and_preset_name_the_run(tmp_path):
    one, two = (samples.lab(seed=seed, workloads=1, run=f"number-{seed}") for seed in (1, 2))
    alone = page_of(tmp_path, one).text
    both = page_of(tmp_path, [*one, *two]).text
    name = f"{one[0].env.gpu}: {one[0].workload.partition('/')[0]}"
    assert f"{name} (run number-1)" not in alone
    assert f"{name} (run number-1)" in both and f"{name} (run number-2)" in both


def test_every_workload_has_a_link(usual):
    ids = [a["id"] for tag, a in usual.elements if tag == "tr" and "id" in a]
    links = [a["href"] for tag, a in usual.elements if tag == "a" and a["href"].startswith("#run-1-")]
    assert len(ids) == len(set(ids)) == 8 and links == [f"#{name}" for name in ids]  # 4 workloads, 2 policies


def test_pages_share_what_they_can_and_are_small(tmp_path):
    alone = html(samples.lab(seed=8, workloads=40), tmp_path / "alone.html")
    shared = html(samples.lab(seed=8, workloads=40), tmp_path / "shared.html", shared=True)
    assert alone.stat().st_size < 200_000
    assert 'src="report.js"' in shared.read_text() and 'href="report.css"' in shared.read_text()


def opened(page, anchor=""):
    """The document, gone to `anchor`, after the page's script has run."""
    fixed = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--window-size=1200,9000"]
    done = subprocess.run(
        [
            BROWSER,
            *fixed,
            "--enable-logging=stderr",
            f"--user-data-dir={page.parent}",
            "--dump-dom",
            f"{page.as_uri()}#{anchor}",
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
@pytest.mark.parametrize("workloads", [3, 40], ids=["bars", "dots"])
def test_a_browser_draws_the_charts(tmp_path, workloads):
    drawn = Drawn(opened(html(samples.lab(seed=8, workloads=workloads), tmp_path / "report.html")))
    assert drawn.tags.count("svg") >= 3 and (drawn.tags.count("rect") > 10) == (workloads == 3)
    assert "NaN" not in "".join(drawn.values)


USE = """
setTimeout(() => {
  const records = document.querySelector(".records"), plot = document.querySelector(".plot");
  records.open = true;
  setTimeout(() => {
    const column = (index) => [...records.querySelectorAll("tbody tr")].map((row) => row.cells[index].textContent);
    const click = (index) => records.querySelectorAll("thead button")[index].click();
    const told = {};
    click(3); told.rising = column(3);
    click(3); told.falling = column(3);
    const filter = records.querySelector("input");
    filter.value = "loop"; filter.dispatchEvent(new Event("input"));
    told.shown = [...records.querySelectorAll("tbody tr")].filter((row) => !row.hidden).length;
    const frame = plot.getBoundingClientRect(), point = plot.points[0];
    const at = { bubbles: true, clientX: frame.left + point.x, clientY: frame.top + point.y };
    plot.dispatchEvent(new PointerEvent("pointermove", at));
    told.tip = document.querySelector(".tip").textContent;
    document.querySelector(".chip[data-backend=quack]").click();
    const marks = [...document.querySelectorAll("g[data-backend]")];
    told.hidden = [...new Set(marks.filter((g) => g.style.display === "none").map((g) => g.dataset.backend))];
    document.title = "told" + JSON.stringify(told) + "told";
  }, 300);
}, 800);
"""


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_browser_sorts_filters_tells_and_hides(tmp_path):
    records = [
        samples.record("w/1", name, time * 1e-6) for name, time in (("loop", 1500), ("quack", 90), ("mine", 700))
    ]
    records.append(samples.record("w/1", "theirs", status="failed", reason="no"))
    page = html(records, tmp_path / "report.html")
    page.write_text(page.read_text().replace("</body>", f"<script>{USE}</script></body>"))
    told = json.loads(unescape(opened(page)).split("told{")[1].split("}told")[0].join("{}"))
    assert told["rising"] == ["90.0", "700", "1,500", "–"] and told["falling"] == ["1,500", "700", "90.0", "–"]
    assert told["shown"] == 1 and told["hidden"] == ["quack"]
    assert told["tip"].startswith("quack, graph") and "90.0 µs ±0.2 %" in told["tip"]


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_a_link_to_a_workload_of_the_other_policy_shows_it(tmp_path):
    page = html(samples.lab(seed=8, workloads=4), tmp_path / "report.html")
    (anchor, *_) = re.findall(r'id="(run-1-[^"]*-eager)"', page.read_text())
    assert '<html lang="en" data-policy="graph"' in opened(page)
    assert '<html lang="en" data-policy="eager"' in opened(page, anchor)


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
    assert glance.count("data-row=") == 2  # the records of two times
    assert 'data-save="csv"' in page and 'data-save="json"' in page


def test_an_unknown_bound_is_a_dash(tmp_path):
    page = page_of(tmp_path, [samples.record(bounded=False), samples.record(backend="b", bounded=False)])
    assert "up – unknown" in page.text
