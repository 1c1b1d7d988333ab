import pytest

from expertile.lab.report import units
from expertile.lab.report.rows import rows
from tests.lab.report import samples


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.012345, "0.012"),
        (0.5, "0.500"),
        (0.99996, "1.00"),
        (1.234, "1.23"),
        (9.996, "10.0"),
        (12.34, "12.3"),
        (99.96, "100"),
        (1234.5, "1,234"),
        (-4.0, "-4.00"),
    ],
)
def test_significant(value, text):
    assert units.significant(value) == text


def test_seconds_become_microseconds():
    assert units.micros(31.2e-6) == "31.2"
    assert units.micros(None) == "–"


@pytest.mark.parametrize(("share", "text"), [(0.934, "93 %"), (0.0123, "1.2 %"), (1.0, "100 %"), (None, "–")])
def test_percent(share, text):
    assert units.percent(share) == text


def test_rate_is_the_one_that_limits():
    compute, memory, copy, none = rows(
        [
            samples.record(time_s=1e-3, rows=65536),
            samples.record(time_s=1e-3, rows=8),
            samples.record(time_s=1e-3, rows=65536, backend="copy"),
            samples.record(status="wrong", reason="no"),
        ]
    )
    assert (compute.limiter, memory.limiter) == ("compute", "memory")
    assert units.rate(compute) == "550 TFLOP/s"
    assert units.rate(memory) == "67.2 GB/s"
    assert units.rate(copy) == "738 GB/s"
    assert units.rate(none) == "–"


def test_small_rates_change_unit():
    assert units.flop_rate(0.0481) == "48.1 GFLOP/s"
    assert units.byte_rate(4123) == "4.12 TB/s"


def test_lists_and_plurals():
    assert units.listed([]) == ""
    assert units.listed(["a", "b", "c"]) == "a, b and c"
    assert units.plural(1, "workload") == "1 workload"
    assert units.plural(2, "workload") == "2 workloads"
