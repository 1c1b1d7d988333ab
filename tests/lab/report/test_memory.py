"""Charts of peak memory, from made-up records whose growth is known."""

import pytest

from expertile.lab.measure.env import Env
from expertile.lab.race.memory import FORMULA
from expertile.lab.report.memory import figure, memory_charts, sentences
from expertile.lab.report.page import html
from expertile.lab.report.palette import styles
from tests.lab.records import timed, untimed
from tests.lab.report import samples

LENGTHS = (1024, 2048, 4096, 8192)


def record(backend, length, peak, formula=None, reason="", run="r", op="attention", **dims):
    shape = {"batch": 4, "length": length, "causal": True, **dims}
    values = {"op": op, "workload": f"a/{length}", "shape": shape, "backend": backend, "run": run, "policy": "eager"}
    values |= {"metric": "peak_bytes", "env": Env("Imaginary GPU"), "details": {FORMULA: formula} if formula else {}}
    return untimed("unsupported", reason, **values) if reason else timed(value=peak, ci95=None, bound=0.0, **values)


def growing():
    """Records of one operator whose peak grows with the length, and of one with its square until it does not fit."""
    found = []
    for length in LENGTHS:
        found.append(record("expertile", length, 2048 * length, 2000.0 * length))
        fits = length < 8192
        found.append(
            record(
                "unfused",
                length,
                6 * length**2 if fits else None,
                6.0 * length**2,
                "" if fits else "out of memory: 1 TB",
            )
        )
    return found


@pytest.fixture
def linear_and_quadratic():
    return growing()


def test_the_dimension_that_varies_is_the_axis(linear_and_quadratic):
    (chart,) = memory_charts(linear_and_quadratic)
    assert (chart.x, chart.title) == ("length", "attention, bf16, batch 4, causal True")
    assert [x for x, _ in chart.measured("expertile")] == list(LENGTHS)
    assert [x for x, _ in chart.measured("unfused")] == list(LENGTHS[:3])
    assert [x for x, _ in chart.formula("unfused")] == list(LENGTHS)
    assert chart.power("expertile") == pytest.approx(1.0) and chart.power("unfused") == pytest.approx(2.0)


def test_words_say_how_it_grows_and_what_did_not_fit(linear_and_quadratic):
    (chart,) = memory_charts(linear_and_quadratic)
    assert sentences(chart) == [
        "`expertile`: 2.00 MiB at length 1024, 16.0 MiB at 8192; at the end it grows as length to the power 1.00; "
        "1.02 to 1.02 times its formula.",
        "`unfused`: 6.00 MiB at length 1024, 96.0 MiB at 4096; at the end it grows as length to the power 2.00; "
        "1.00 to 1.00 times its formula.",
        "`unfused` fails from length 8192 on: out of memory: 1 TB.",
    ]


def test_other_dims_operators_and_runs_have_charts_of_their_own(linear_and_quadratic):
    wider = [record("expertile", n, 4096 * n, batch=8) for n in LENGTHS]
    later = [record("expertile", n, 4096 * n, run="s") for n in LENGTHS]
    layer = [record("expertile", n, 99 * n, op="moe") for n in LENGTHS]
    records = [*linear_and_quadratic, *wider, *later, *layer]
    assert [(c.op, c.first.run, dict(c.fixed)["batch"]) for c in memory_charts(records)] == [
        ("attention", "r", 4),
        ("attention", "r", 8),
        ("attention", "s", 4),
        ("moe", "r", 4),
    ]


def test_dimensions_that_are_always_equal_are_one():
    found = [record("expertile", n, 100 * n, k_len=n, heads=4) for n in LENGTHS]
    (chart,) = memory_charts(found)
    # heads and batch are equal as well, but no axis; the two lengths are.
    assert (chart.x, chart.fixed) == ("length", (("batch", 4), ("causal", True), ("heads", 4)))
    assert memory_charts([*found, record("expertile", 1024, 1, k_len=512, heads=4)]) == []


def test_two_lengths_are_no_growth():
    assert memory_charts([record("expertile", n, n) for n in LENGTHS[:2]]) == []


def test_the_figure_has_measured_curves_and_formulas(linear_and_quadratic):
    (chart,) = memory_charts(linear_and_quadratic)
    found = figure(chart, styles(chart.backends))
    drawn = {(mark["backend"], mark["kind"]): mark for mark in found["marks"]}
    assert drawn.keys() == {(b, kind) for b in ("expertile", "unfused") for kind in ("curve", "line")}
    assert drawn["unfused", "curve"]["x"] == list(LENGTHS[:3]) and drawn["unfused", "line"]["x"] == list(LENGTHS)
    assert drawn["expertile", "curve"]["notes"][0] == "expertile\nlength 1024\n2.00 MiB"
    assert found["x"]["title"] == "length (logarithmic)"


def test_the_html_report_holds_the_chart(tmp_path, linear_and_quadratic):
    text = html([samples.record(), *linear_and_quadratic], tmp_path / "r.html").read_text()
    assert "Peak memory of a call" in text and 'data-backend="unfused"' in text
    assert "to the power 2.00" in text
    assert "Peak memory of a call" not in html([samples.record()], tmp_path / "s.html").read_text()
