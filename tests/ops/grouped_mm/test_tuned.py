"""The table of measured times: round trip, distance, skew, and tables that cannot be read."""

import json
import math
import random
from dataclasses import replace

import pytest

from expertile.device import Device
from expertile.lab.race.workloads import ragged_m, wgrad
from expertile.ops.grouped_mm import tuned
from expertile.ops.grouped_mm.backend import config_dict
from expertile.ops.grouped_mm.backends import BACKENDS
from expertile.ops.grouped_mm.tuned import (
    FAR,
    Measured,
    Problems,
    Table,
    Timed,
    candidate_key,
    features_of,
    load_tables,
    loose_key,
    save_table,
    skew_class,
)


def features(rows=1024, groups=8, k=512, n=768, dtype="bf16", **more):
    return features_of(ragged_m("x", "", (rows // groups,) * groups, k, n, dtype, **more).problem("cuda"))


def table(*problems):
    return Table("NVIDIA H200", "2026-11-21", {"torch": "2.11", "triton": None}, problems, (0, 7))


TIMES = (Timed("fast", {"block_m": 64, "flatten": True}, 1.25e-5), Timed("slow", {}, 0.5))


def test_round_trip(tmp_path):
    first = table(Measured(features(), "graph", TIMES), Measured(features(rows=64), "eager", TIMES[1:]))
    save_table(first, tmp_path / "deep" / "gpu.json")
    text = (tmp_path / "deep" / "gpu.json").read_text()
    assert Table.from_json(text) == first
    assert text.count("fast") == 1, "each candidate is written once"
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["gpu.json"]


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda d: d.update(version=99), "expected version 1, got 99"),
        (lambda d: d.pop("gpu"), "gpu"),
        (lambda d: d["candidates"].clear(), "IndexError"),
        (lambda d: d["problems"][0].__setitem__(-1, []), "expected times"),
        (lambda d: d["problems"][0].pop(0), "expected"),
    ],
)
def test_a_damaged_table_is_refused(damage, said):
    data = json.loads(table(Measured(features(), "graph", TIMES)).to_json())
    damage(data)
    with pytest.raises(ValueError, match=said):
        Table.from_json(json.dumps(data))


def test_a_table_of_another_version_is_passed_over_with_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(tuned, "user_folder", lambda: tmp_path / "user")
    monkeypatch.setattr(tuned, "package_folder", lambda: tmp_path / "package")
    save_table(table(Measured(features(), "graph", TIMES)), tmp_path / "package" / "made-up.json")
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "made-up.json").write_text('{"version": 0}')
    load_tables.cache_clear()
    with pytest.warns(UserWarning, match="is not used: table: expected version 1, got 0"):
        assert load_tables("made-up")[0].problems[0].times == TIMES
    assert load_tables("nobody-has-this") == ()
    load_tables.cache_clear()


def distance(f, other):
    found = Problems([Measured(other, "graph", TIMES)]).nearest(f, 1)
    return found[0][0] if found else math.inf


def test_distance_grows_with_the_logarithm_and_has_steps():
    here = features()
    assert distance(here, here) == 0
    steps = [distance(here, features(rows=rows)) for rows in (1024, 2048, 4096, 8192, 65536)]
    assert steps == sorted(steps) and steps[1] > 0.5
    assert 0 < distance(here, features(k=1024)) < distance(here, features(k=4096))
    assert distance(here, features(k=1024)) == pytest.approx(distance(features(k=1024), here))
    assert distance(here, features(b_layout="kn")) == pytest.approx(0.3), "other order, same shape"
    assert distance(here, features(dtype="fp16")) == 0, "both are 16 bits wide"
    shorter = features(k=504)
    assert distance(here, shorter) > 1 > distance(shorter, features(k=496)), "rows of 1008 bytes begin anywhere"
    assert distance(here, features(dtype="fp32")) == math.inf
    gradient = features_of(wgrad("x", "", (128,) * 8, 512, 768, "bf16").problem("cuda"))
    assert distance(here, gradient) == math.inf and gradient.rows == 1024 and gradient.k == 512


def test_tiles_and_elements_count_what_is_used():
    assert features(rows=1024, groups=8, n=768).tiles == 8 * 1 * 3
    assert features(rows=1032, groups=8, n=768).tiles == 8 * 2 * 3
    assert features(rows=1024, groups=8, k=512, n=768).elements == 1024 * (512 + 768) + 8 * 512 * 768
    few = features_of(ragged_m("x", "", (1, 0, 1, 0, 0, 0, 0, 0), 512, 768, "bf16").problem("cuda"))
    assert few.elements == 2 * (512 + 768) + 2 * 512 * 768, "two groups at most have rows"
    gradient = features_of(wgrad("x", "", (64,) * 8, 512, 768, "bf16").problem("cuda"))
    assert gradient.tiles == 8 * 4 * 3 and gradient.elements == 512 * (512 + 768) + 8 * 512 * 768
    empty = features_of(ragged_m("x", "", (0, 0), 512, 768, "bf16").problem("cuda"))
    assert all(map(math.isfinite, empty.point))


def test_features_know_which_operands_have_aligned_rows_as_the_problem_does():
    found = [
        ragged_m("x", "", (7, 9), k, n, "bf16", b_layout=o) for k in (512, 520) for n in (64, 72) for o in ("nk", "kn")
    ]
    found += [wgrad("x", "", (7, 9), 64, n, "bf16") for n in (64, 72)]
    found += [ragged_m("x", "", (7, 9), 32, n, "fp32") for n in (32, 40)]
    problems = [w.problem("cuda") for w in found]
    assert [features_of(p).aligned for p in problems] == [p.aligned_rows for p in problems]
    assert problems[0].aligned_rows == (True, True) and problems[3].aligned_rows == (True, False)
    assert problems[4].aligned_rows == (False, False) and problems[5].aligned_rows == (False, True)


def test_nearest_are_sorted_and_none_where_all_are_far():
    measured = Problems(Measured(features(rows=8 * r), "graph", TIMES) for r in (16, 128, 512, 8192))
    found = measured.nearest(features(rows=1024), 2)
    assert [m.features.rows for _, m in found] == [1024, 4096]
    assert [m.features.rows for _, m in measured.nearest(features(rows=1024), 9)] == [1024, 4096, 128, 65536]
    assert measured.nearest(features(rows=1, groups=1, k=16, n=131072), 3) == []
    assert measured.nearest(features(dtype="fp32"), 3) == []


def test_nearest_are_those_of_all_distances():
    """The table of the H200: the same problems in the same order as by distances worked out one by one."""
    table, draw = load_tables("nvidia-h200")[0], random.Random(0)
    for _ in range(200):
        size = [int(2 ** draw.uniform(*bounds)) for bounds in ((0, 17), (0, 9), (5, 14), (5, 14))]
        f = replace(draw.choice(table.problems).features, **dict(zip(("rows", "groups", "k", "n"), size, strict=True)))

        def apart(other, f=f):
            steps = 0.3 * (f.orders != other.orders) + 0.5 * (f.skew != other.skew)
            return math.dist(f.point, other.point) + steps + 1.0 * (all(f.aligned) != all(other.aligned))

        for measured in map(table.of, ("graph", "eager")):
            alike = [m for m in measured if (m.features.layout, m.features.dtype) == (f.layout, f.dtype)]
            every = sorted(apart(m.features) for m in alike)[:16]
            found = measured.nearest(f, 16)
            assert [d for d, _ in found] == pytest.approx(every if every and every[0] < FAR else [])
            assert all(d == pytest.approx(apart(m.features)) for d, m in found)


def test_slowdowns_are_logarithms_over_the_best():
    times = (Timed("a", {"x": 1, "group_m": 4}, 1.0), Timed("b", {}, 2.0), Timed("a", {"x": 1, "group_m": 8}, 3.0))
    m = Measured(features(), "graph", times)
    assert m.slowdowns[candidate_key("a", {"group_m": 8, "x": 1})] == pytest.approx(math.log(3))
    assert m.slowdowns[loose_key("a", {"group_m": 8, "x": 1})] == 0.0, "the faster of both"
    assert dict(m.backends) == pytest.approx({"a": 0.0, "b": math.log(2)})


def test_what_changes_times_least_is_left_out_of_the_loose_key() -> None:
    one, other = ({"x": 1, "group_m": 4, "num_stages": 4, "store_parts": 1}, {"x": 1, "num_stages": 5})
    assert loose_key("a", one) == loose_key("a", other) != loose_key("a", {"x": 2})
    assert candidate_key("a", one) != candidate_key("a", other)


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA H100 80GB HBM3"])
def test_tables_ship_and_are_small(gpu):
    path = tuned.package_folder() / f"{Device.by_name(gpu).slug}.json"
    shipped = Table.from_json(path.read_text(encoding="utf-8"))
    assert path.stat().st_size < 300_000
    assert shipped.gpu == gpu and shipped.seeds
    assert {m.features.layout for m in shipped.of("graph")} == {"ragged_m", "ragged_k", "batched"}


def test_the_h200_table_knows_the_configs_of_today():
    """A field added to a config must not hide what was measured without it."""
    table = Table.from_json((tuned.package_folder() / "nvidia-h200.json").read_text(encoding="utf-8"))
    measured = {key for m in table.problems for key in m.slowdowns}
    device = Device.by_name("h200")
    for backend in BACKENDS:
        if backend.peer or backend.reads_offs_on_host:
            continue
        workloads = (ragged_m("x", "", (512,) * 8, 2048, 2048, "bf16"), wgrad("x", "", (512,) * 8, 2048, 2048, "bf16"))
        for problem in (w.problem("cuda") for w in workloads):
            default = backend.configs(problem, device)[0]
            assert candidate_key(backend.name, config_dict(default)) in measured, default


def test_a_flag_that_is_off_is_as_if_it_were_not_there():
    assert candidate_key("x", {"n": 0, "flag": False}) == candidate_key("x", {"n": 0})
    assert candidate_key("x", {"n": 0, "flag": True}) != candidate_key("x", {"n": 0})


def test_skew_classes():
    assert skew_class(None) == skew_class((5,)) == skew_class((0, 0)) == skew_class((7, 8, 9, 8)) == "even"
    assert skew_class((90, 4, 3, 3)) == "one"
    assert skew_class((64, 32, 21, 16, 13, 11, 9, 8, 1, 0, 0, 0)) == "skewed"
    assert skew_class((1, 0, 2, 0, 1, 0, 0, 3, 1, 1, 0, 1, 0, 2, 1, 1)) == "even", "what chance gives is even"


def test_policies():
    both = table(Measured(features(), "graph", TIMES), Measured(features(), "eager", TIMES))
    assert [m.policy for m in both.of("eager")] == ["eager"]
    assert [m.policy for m in table(both.problems[0]).of("eager")] == ["graph"], "better than nothing"
