import json
import re
from importlib.resources import files

import pytest

from expertile.lab.operators import operators
from expertile.lab.report.palette import _KNOWN, _SPARE, styles
from tools.pages.colours import contrast
from tools.pages.shapes import outlines


def test_a_backend_looks_the_same_whoever_it_races():
    assert styles(["loop", "quack"])["quack"] == styles(["quack", "triton_tma", "mine"])["quack"]


def test_all_of_a_usual_race_differ_in_colour_and_marker():
    looks = styles(
        [
            "triton_tma",
            "triton_pointer",
            "torch_grouped",
            "cublas_grouped",
            "quack",
            "padded_bmm",
            "loop",
            "gluon_hopper",
            "mine",
            "yours",
            "theirs",
        ]
    )
    assert len({colour for colour, _ in looks.values()}) == len(looks)
    assert len({symbol for _, symbol in looks.values()}) == len(looks)


@pytest.mark.parametrize("op", operators())
def test_rivals_of_an_operator_differ_in_colour_and_marker(op):
    looks = styles(rival.name for rival in operators()[op].rivals)
    assert len({colour for colour, _ in looks.values()}) == len({symbol for _, symbol in looks.values()}) == len(looks)


def test_baselines_have_no_rival_style():
    assert styles(["dense", "copy"]) == {}


def colours(css):
    return dict(re.findall(r"--(\w+): ?(#\w{6})", css))


@pytest.fixture(params=["light", "dark"])
def theme(request):
    """The custom properties of the page in one theme, and the least contrast of graphics on it."""
    light, dark = re.findall(r":root \{(.*?)\}", PAGE_CSS, re.DOTALL)
    own = colours(light) | (colours(dark) if request.param == "dark" else {})
    shade = re.findall(r"--shade: ([\d, ]+);", PAGE_CSS)[request.param == "dark"]
    own["shade"] = [int(part) for part in shade.split(",")]
    return own, request.param


ASSETS = files("expertile.lab.report") / "assets"
PAGE_CSS = (ASSETS / "report.css").read_text("utf-8")


@pytest.mark.parametrize("text", ["fg", "muted", "accent", "bad", "warn", "good"])
def test_text_stands_out_by_four_and_a_half(theme, text):
    own, _ = theme
    assert min(contrast(own[text], own[card]) for card in ("bg", "panel")) >= 4.5


def test_text_stands_out_on_the_shades_of_the_first_table(theme):
    own, _ = theme
    deepest = 0.46  # .04 + .42 of a share of 1, in the rule of a cell
    assert "calc(.04 + .42 * var(--share) * var(--share))" in PAGE_CSS
    under = [int(own["bg"][i : i + 2], 16) for i in (1, 3, 5)]
    mixed = [round(deepest * a + (1 - deepest) * b) for a, b in zip(own["shade"], under, strict=True)]
    assert contrast("#" + "".join(f"{c:02x}" for c in mixed), own["fg"]) >= 4.5


def test_backends_stand_out_from_the_page_and_text_from_them(theme):
    own, name = theme
    names = {colour[1:] for colour, _ in (*_KNOWN.values(), *_SPARE)}
    assert {key[1:] for key in own if re.fullmatch(r"[ct]\w{6}", key)} == names
    assert len({own[f"c{colour}"] for colour in names}) == len(names) > 10
    for colour in names:
        # Graphics need 3 : 1.
        assert contrast(own[f"c{colour}"], own["bg"]) >= (4.5 if name == "dark" else 3.0), colour
        assert contrast(own[f"c{colour}"], own[f"t{colour}"]) >= 4.5, colour


def test_every_marker_has_the_same_outline_in_pages_and_documents():
    found = re.search(r"const markers = \{(.*?)\};", (ASSETS / "report.js").read_text("utf-8"), re.DOTALL)[1]
    text = re.sub(r"^ *(\w+):", r'"\1":', found, flags=re.MULTILINE).strip().rstrip(",")
    assert json.loads(f"{{{text}}}") == outlines()
    assert {symbol for _, symbol in (*_KNOWN.values(), *_SPARE)} <= outlines().keys()


def test_contrast_is_wcags():
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
