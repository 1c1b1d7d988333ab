import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertile.lab.audit.quantities import find_quantities, plain_number, show, with_unit


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("Sequential Time: 2.84ms", "time", 2.84e-3),
        ("latency 15 us", "time", 15e-6),
        ("~10μs", "time", 10e-6),
        ("612 TFLOPs/s", "flop_rate", 612e12),
        ("330.862 GFlops", "flop_rate", 330.862e9),
        ("1.2 PFLOPS", "flop_rate", 1.2e15),
        ("3 TF/s", "flop_rate", 3e12),
        ("3.35TB/s", "byte_rate", 3.35e12),
        ("1,688 GB/s", "byte_rate", 1688e9),
        ("2 GiB/s", "byte_rate", 2 * 2**30),
        ("34.1 GB memory", "bytes", 34.1e9),
        ("16 MiB", "bytes", 16 * 2**20),
        ("13.52x", "ratio", 13.52),
        ("2.67×", "ratio", 2.67),
        ("1.5 x faster", "ratio", 1.5),
        ("84%", "percent", 0.84),
        ("131.2 t/s", "token_rate", 131.2),
        ("45k tokens/s", "token_rate", 45e3),
        ("1000 inferences/second", "event_rate", 1000),
        ("17.4 ops/byte", "intensity", 17.4),
        ("12 TFLOP", "flops", 12e12),
        ("22.6 GPU-hours/day", "time", 22.6 * 3600),
    ],
)
def test_reads_units(text, kind, value):
    (quantity,) = find_quantities(text)
    assert (quantity.kind, quantity.value) == (kind, pytest.approx(value))
    assert quantity.value in quantity.interval


@pytest.mark.parametrize(
    "text",
    [
        "4096x4096",
        "128×128 tiles",
        "V100-SXM2-32GB",
        "8x H100",
        "B=4 H=32 S=8192 D=128",
        "400 Gbps",
        "Mixtral-8x7B",
        "v2.1",
    ],
)
def test_names_shapes_and_counts_are_no_quantities(text):
    assert find_quantities(text) == []


def test_a_range_has_two_ends():
    (quantity,) = find_quantities("2-5x slower")
    assert (quantity.span.lo, quantity.span.hi) == (1.5, 5.5)
    (quantity,) = find_quantities("0.03x-0.13x")
    assert quantity.span.hi == pytest.approx(0.135)


def test_from_to_is_two_figures_and_no_range():
    assert [q.value for q in find_quantities("from 5 to 3 ms")] == [pytest.approx(5e-3), pytest.approx(3e-3)]


def test_bounds_open_the_interval():
    assert find_quantities("< 5 ms")[0].interval.lo == 0
    assert find_quantities("over 900 GB/s")[0].interval.hi == math.inf
    assert find_quantities("up to 2.6x")[0].bound == "up to"


def test_gb_may_have_meant_gib():
    readings = find_quantities("4 GB")[0].readings
    assert len(readings) == 2
    assert readings[1].mid == pytest.approx(4 * 2**30)


def test_a_bare_cell_takes_the_unit_of_its_header():
    quantity = with_unit("0.177 ± 0.01", "time", 1e-3)
    assert quantity is not None
    assert quantity.interval.lo == pytest.approx(0.1765e-3)
    assert with_unit("n/a", "time", 1e-3) is None


@pytest.mark.parametrize("text", ["2^10", "511.5K", "12×16", "x"])
def test_no_plain_number(text):
    assert plain_number(text) is None


@given(st.floats(1e-7, 10).map(lambda t: float(f"{t:.4g}")))
def test_what_show_prints_is_read_back(seconds):
    (quantity,) = find_quantities(show("time", seconds))
    assert seconds in quantity.interval.widened(1e-3)
