"""A GPU of a measured chip takes its relative's table: whose, with which times, and what is said of it."""

import warnings
from dataclasses import replace

import pytest

from expertile.cli import doctor
from expertile.device import Device
from expertile.lab.race.workloads import ragged_m
from expertile.ops.grouped_mm import relatives
from expertile.ops.grouped_mm.choose import choose
from expertile.ops.grouped_mm.explain import explain_problem
from expertile.ops.grouped_mm.relatives import scaled, table_for
from expertile.ops.grouped_mm.tuned import Measured, Table, Timed, features_of

H200, H100, NVL, PCIE = (Device.by_name(n) for n in ("h200", "h100 sxm", "h100 nvl", "h100 pcie"))


def features(rows, k=4096, n=4096, groups=8):
    return features_of(ragged_m("x", "", (rows // groups,) * groups, k, n, "bf16").problem("cuda"))


def times(of, *seconds, here=H100):
    """What these times of one problem on an H200 are on `here`."""
    measured = Measured(of, "graph", tuple(Timed(f"b{i}", {}, s) for i, s in enumerate(seconds)))
    (problem,) = scaled(Table("NVIDIA H200", "2026-11-21", {}, (measured,)), H200, here).problems
    return [t.seconds for t in problem.times]


def test_the_same_chip_takes_the_table_and_others_do_not():
    assert table_for(H200).gpu == "NVIDIA H200" and not table_for(H200).relative
    for name in ("h100 sxm", "h100 nvl", "h800", "gh200"):
        found = table_for(Device.by_name(name))
        assert found.gpu == "NVIDIA H200" and found.relative, name
        assert len(found.problems) == len(table_for(H200).problems)
    for name in ("h100 pcie", "h20", "a100", "b200", "rtx 4090"):
        assert table_for(Device.by_name(name)) is None, name
    assert table_for(Device.current("cpu")) is None


def test_a_table_of_its_own_goes_first(monkeypatch):
    own = Table(H100.name, "2026-11-25", {}, ())
    both = {H100.slug: own, H200.slug: Table(H200.name, "2026-11-23", {}, ())}
    monkeypatch.setattr(relatives, "load_table", both.get)
    table_for.cache_clear()
    assert table_for(H100) is own and table_for(NVL).relative
    table_for.cache_clear()


def test_what_memory_limits_takes_as_much_longer_as_bandwidth_is_smaller():
    decode = features(64)
    floor = 2 * decode.elements / H200.memory_bps
    (seconds,) = times(decode, floor + 2e-6)
    assert (seconds - 2e-6) / floor == pytest.approx(4.8 / 3.35)


def test_what_products_limit_hardly_changes_but_by_the_clock():
    prefill = features(65536)
    (seconds,) = times(prefill, 4e-3)
    assert 4e-3 < seconds < 4e-3 * 1.03
    (slower,) = times(prefill, 4e-3, here=NVL)
    assert slower / 4e-3 == pytest.approx(1.98 / 1.785, rel=0.02)


def test_backends_come_nearer_where_memory_limits_and_keep_their_order():
    decode = features(64)
    floor = 2 * decode.elements / H200.memory_bps / 0.93
    was = (floor, 1.2 * floor, 1.5 * floor)
    fastest, second, third = times(decode, *was)
    assert fastest < second < third
    assert 1 < second / fastest < 1.15 and third / fastest < 1.35


def test_a_bandwidth_that_nobody_states_changes_nothing():
    assert times(features(64), 1e-4, 2e-4, here=replace(H100, memory_bps=None)) == pytest.approx([1e-4, 2e-4])


@pytest.mark.parametrize("n", [512, 1536])
def test_an_h100_chooses_by_its_relative_and_says_so(n):
    """With the model alone this layer took triton_pointer's products, at 0.8 of SonicMoE's speed."""
    problem = ragged_m("x", "", (1536,) * 128, 256, n, "bf16").problem("cuda").with_sizes(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice = choose(problem, H100)
    assert choice.backend.name == "gluon_hopper" and not choice.measured
    text = str(explain_problem(problem, H100))
    assert "measured on NVIDIA H200" in text and f"times scaled to {H100.name}" in text
    assert "NVIDIA H200's times, scaled" in text and "measured on problems like this" not in text
    assert choose(problem, H200).measured and "scaled" not in str(explain_problem(problem, H200))


def test_the_expected_time_is_that_of_the_slower_memory():
    problem = ragged_m("x", "", (8,) * 128, 4096, 4096, "bf16").problem("cuda").with_sizes(None)
    seconds = {}
    for device in (H200, H100):
        choice = choose(problem, device)
        seconds[device.slug] = next(e.seconds for e in choice.estimates if e.backend == choice.backend.name)
    assert seconds[H100.slug] / seconds[H200.slug] == pytest.approx(4.8 / 3.35, rel=0.05)


def test_doctor_says_whose_table_it_is():
    assert doctor._tuned(H200).endswith("nvidia-h200.json")
    assert doctor._tuned(H100).endswith("nvidia-h200.json (of NVIDIA H200, the same chip; times scaled)")
    assert doctor._tuned(PCIE) == ""


def test_the_table_in_a_file_is_nobodys_relative():
    found = table_for(H100)
    assert found.relative and not Table.from_json(found.to_json()).relative
