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
    for device, gpu in ((H200, H200), (H100, H100), (NVL, H100), (Device.by_name("gh200"), H100)):
        found = table_for(device)
        assert found.gpu == gpu.name and found.relative == (gpu is not device), device.name
        others = {m.gpu for m in found.problems}
        assert others == {"", H200.name if gpu is H100 else H100.name}, device.name
    for name in ("h100 pcie", "h20", "a100", "b200", "rtx 4090"):
        assert table_for(Device.by_name(name)) is None, name
    assert table_for(Device.current("cpu")) is None


def test_another_gpus_problem_counts_where_the_table_has_nothing_as_near(monkeypatch):
    def table(gpu, *of):
        problems = tuple(Measured(features(rows), "graph", (Timed("b", {}, 1e-3),)) for rows in of)
        return Table(gpu.name, "2026-11-25", {}, problems)

    both = {H100.slug: (table(H100, 64, 65536),), H200.slug: (table(H200, 64, 2048),)}
    monkeypatch.setattr(relatives, "load_tables", lambda slug: both.get(slug, ()))
    table_for.cache_clear()
    problems = table_for(H100).of("graph")
    asked = [problems.nearest(features(rows), 1)[0][1] for rows in (64, 2048, 65536)]
    assert [m.gpu for m in asked] == ["", H200.name, ""]
    assert [m.times[0].seconds > 1e-3 for m in asked] == [False, True, False]
    table_for.cache_clear()


def test_a_users_own_table_is_completed_by_the_packages(monkeypatch):
    """Eight minutes of tuning measure a part of what the package's table has."""
    made = [Measured(features(rows), "graph", (Timed("b", {}, 1e-3),)) for rows in (64, 65536)]
    own, shipped = (Table(H200.name, date, {}, (m,), (n,)) for n, (date, m) in enumerate(zip("ab", made, strict=True)))
    monkeypatch.setattr(relatives, "load_tables", lambda slug: (own, shipped) if slug == H200.slug else ())
    table_for.cache_clear()
    found = table_for(H200)
    assert (found.date, found.relative, found.seeds) == ("a", False, (0, 1))
    assert [m.gpu for m in found.problems] == ["", H200.name]
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
def test_a_gpu_without_a_table_chooses_by_its_relative_and_says_so(n):
    """With the model alone this layer took triton_pointer's products, at 0.8 of SonicMoE's speed."""
    problem = ragged_m("x", "", (1536,) * 128, 256, n, "bf16").problem("cuda").with_sizes(None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice = choose(problem, NVL)
    assert choice.backend.name == "gluon_hopper" and not choice.measured
    text = str(explain_problem(problem, NVL))
    assert f"measured on {H100.name}" in text and f"times scaled to {NVL.name}" in text
    assert f"{H100.name}'s times, scaled" in text and "measured on problems like this" not in text
    assert choose(problem, H200).measured and "scaled" not in str(explain_problem(problem, H200))


def test_the_expected_time_is_that_of_this_gpus_memory():
    problem = ragged_m("x", "", (8,) * 128, 4096, 4096, "bf16").problem("cuda").with_sizes(None)
    seconds = {}
    for device in (NVL, H100):
        choice = choose(problem, device)
        seconds[device.slug] = next(e.seconds for e in choice.estimates if e.backend == choice.backend.name)
    assert seconds[H100.slug] / seconds[NVL.slug] == pytest.approx(3.938 / 3.35, rel=0.05)


def test_doctor_says_whose_table_it_is():
    assert doctor._tuned(H200).endswith("nvidia-h200.json")
    assert doctor._tuned(NVL).endswith("hbm3.json (of NVIDIA H100 80GB HBM3, the same chip; times scaled)")
    assert doctor._tuned(PCIE) == ""


def test_the_table_in_a_file_is_nobodys_relative():
    found = table_for(NVL)
    assert found.relative and not Table.from_json(found.to_json()).relative
