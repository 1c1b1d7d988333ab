"""SVG charts: well-formed, every series drawn and named, colours that stand out in both themes."""

import xml.etree.ElementTree as ET

import pytest

from expertile.lab.report.palette import styles
from tools.pages.colours import contrast, readable
from tools.pages.svg import _CARDS, Series, curves, dots, ticks

SVG = "{http://www.w3.org/2000/svg}"
TWO = (
    Series("ours & theirs", ((1, 10.0), (4, 20.0), (16, 90.0)), "#0072B2", "circle"),
    Series("bound", ((1, 8.0), (16, 80.0)), dash="4 2"),
)


def _texts(root):
    return [t.text for t in root.iter(f"{SVG}text")]


def test_curves_draw_every_series_with_its_name_and_labels():
    root = ET.fromstring(curves("a title", "tokens", "time", TWO))
    lines = root.findall(f"{SVG}polyline")
    assert [len(line.get("points").split()) for line in lines] == [3, 2]
    assert lines[1].get("stroke-dasharray") == "4 2" and lines[0].get("stroke-dasharray") is None
    assert {"a title", "tokens", "time", "ours & theirs", "bound", "1", "16", "10"} <= set(_texts(root))
    assert len(root.findall(f"{SVG}circle")) == 3 + 1  # points, and one in the legend


def test_larger_values_stand_higher_and_further_right():
    line = ET.fromstring(curves("t", "x", "y", TWO)).find(f"{SVG}polyline")
    points = [tuple(map(float, p.split(","))) for p in line.get("points").split()]
    (x1, y1), (x2, y2), (x3, y3) = points
    assert x1 < x2 < x3 and y1 > y2 > y3
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)  # 1, 4, 16: equal steps


def test_everything_lies_on_the_card():
    root = ET.fromstring(curves("t", "x", "y", TWO))
    width, height = float(root.get("width")), float(root.get("height"))
    for element in root.iter():
        for name, most in (("x", width), ("x1", width), ("x2", width), ("cx", width), ("y", height), ("cy", height)):
            assert 0 <= float(element.get(name, 0)) <= most


def test_dots_put_rows_below_each_other():
    series = [Series("a", ((1.0, 0), (2.0, 1)), "#E69F00", "circle"), Series("b", ((3.0, 1),), "#117733", "x")]
    root = ET.fromstring(dots("t", "ratio", ["first", "second"], series, (1.0, 1.05)))
    circles = [(float(c.get("cx")), float(c.get("cy"))) for c in root.findall(f"{SVG}circle")]
    (x1, y1), (x2, y2) = circles[:2]
    assert x1 < x2 and y2 - y1 == pytest.approx(24)
    assert sum(line.get("class") == "guide" for line in root.iter(f"{SVG}line")) == 2
    assert {"first", "second", "a", "b"} <= set(_texts(root))


@pytest.mark.parametrize("theme", _CARDS)
def test_every_backend_stands_out_in_both_themes(theme):
    card = _CARDS[theme]
    for colour, _ in styles(["triton_tma", "gluon_hopper", "quack", "loop", "padded_bmm", "stranger"]).values():
        assert contrast(readable(colour, card), card) >= 3.0
    assert readable("#ffffff", "#ffffff") != "#ffffff"


def test_ticks_are_few_and_inside():
    assert ticks(1, 65536, 2) == [2.0**e for e in range(0, 17, 2)]
    assert ticks(0.9, 1.4, 10) == [1.0, 1.1, 1.2, 1.3]
    assert ticks(10, 100000, 10) == [10.0, 100.0, 1000.0, 10000.0, 100000.0]


@pytest.mark.parametrize("bad", [(), ((1, 0.0),), ((float("nan"), 1.0),), ((1, -2.0),)])
def test_what_no_logarithm_shows_is_refused(bad):
    with pytest.raises(ValueError, match="series: expected"):
        curves("t", "x", "y", [Series("a", tuple(bad), "#0072B2", "circle")])
