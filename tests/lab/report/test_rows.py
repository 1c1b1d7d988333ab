from dataclasses import replace

import pytest

from expertile.lab.report.rows import fixed_routing, rows, shape_text
from tests.lab.report import samples


def test_rates_follow_from_work_and_time():
    (row,) = rows([samples.record(time_s=200e-6)])
    assert row.tflops == pytest.approx(row.flops / 200e-6 / 1e12)
    assert row.gbps == pytest.approx(row.nbytes / 200e-6 / 1e9)
    assert row.share == pytest.approx(row.bound_s / 200e-6)


def test_a_bound_of_zero_means_that_none_is_known():
    (row,) = rows([samples.record(bounded=False)])
    assert row.bound_s == 0.0
    assert row.share is None


def test_a_refused_time_is_not_compared():
    (row,) = rows([replace(samples.record(), status="refused", reason="below its bound")])
    assert row.time_s is not None
    assert not row.timed


@pytest.mark.parametrize(
    ("throttle", "expected"), [("sw_power_cap, hw_slowdown", ("sw_power_cap", "hw_slowdown")), ("", ()), (None, ())]
)
def test_throttle_reasons(throttle, expected):
    (row,) = rows([samples.record(env={"gpu": "x", "throttle": throttle})])
    assert row.throttle == expected


def test_preset_is_the_first_part_of_the_name():
    names = ["squares/4x512", "alone"]
    assert [row.preset for row in rows([samples.record(name) for name in names])] == ["squares", "workloads"]


def test_control_characters_do_not_reach_a_terminal():
    (row,) = rows([samples.record("evil\x1b[31m\nname")])
    assert row.workload == "evil [31m name"


def test_family_ignores_the_number_of_rows_only():
    small, large, wide = rows([samples.record(rows=64), samples.record(rows=4096), samples.record(n=512)])
    assert small.family == large.family != wide.family
    assert (small.tokens, large.tokens) == (64, 4096)
    assert fixed_routing("zipf(1) tokens=8192 seed=0") == "zipf(1) seed=0"


def test_shape_text_sums_up_group_sizes():
    assert shape_text({"k": 8, "group_sizes": [1, 5, 0], "routing": ""}) == (
        "k=8 · group_sizes=3 groups, 6 in all, 0 to 5"
    )
