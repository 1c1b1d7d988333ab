"""The machinery of the gpu tier's random shapes and sanitizer, on the CPU: draws, strides, reproduction, verdicts."""

import random

import pytest
import torch

from expertile.device import Device
from expertile.ops.grouped_mm.backends import BACKENDS
from expertile.ops.grouped_mm.problem import Layout, Problem
from tests.gpu import random_shapes, sanitize
from tests.gpu.random_shapes import Summary, cases, draw, problem_of, profiles, program, specialisations
from tests.ops.grouped_mm.cases import STORAGES, Case, make

H200 = Device.by_name("h200")
OWN = tuple(b for b in BACKENDS if not b.peer)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strides_are_known_without_making_the_tensors(storage, layout, dtype):
    case = Case(
        "x",
        layout,
        (0, 0, 0) if layout is Layout.BATCHED else (3, 0, 9),
        m=7,
        n=13,
        k=10,
        past=0,
        a_storage=storage,
        b_storage=storage,
        dtype=dtype,
    )
    made = Problem.from_tensors(*make(case, "cpu")).with_sizes(None)
    foreseen = problem_of(case, Device.current("cpu"))
    assert foreseen.a_strides == made.a_strides and foreseen.b_strides == made.b_strides
    assert (foreseen.layout, foreseen.groups, foreseen.m, foreseen.n, foreseen.k) == (
        made.layout,
        made.groups,
        made.m,
        made.n,
        made.k,
    )


def test_profiles_cover_every_layout_dtype_and_storage():
    every = profiles()
    assert len(set(every)) == len(every)
    assert {p.layout for p in every} == set(Layout)
    assert {p.dtype for p in every} == {torch.bfloat16, torch.float16, torch.float32}
    assert {p.a_storage for p in every} == set(STORAGES)
    assert any(p.tf32 for p in every) and any(p.bias for p in every) and any(p.many for p in every)


def test_draws_are_various_but_need_few_kernels():
    count, needed, shapes = 1000, {}, set()
    for _, profile, case, _ in cases(count, 0, 0, 1, H200, OWN):
        needed.setdefault(profile, set()).update(specialisations(case, profile, H200, OWN))
        shapes.add((case.layout, case.sizes, case.m, case.n, case.k))
    assert all(len(found) <= 2 * random_shapes._VARIANTS for found in needed.values())
    assert len(shapes) > 0.85 * count
    assert any(0 in sizes and max(sizes) > 0 for _, sizes, *_ in shapes)


def test_parts_share_the_cases_out_and_every_case_stands_alone():
    whole = {i: (c, s) for i, _, c, s in cases(260, 3, 0, 1, H200, OWN)}
    parts = {i: (c, s) for part in range(3) for i, _, c, s in cases(260, 3, part, 3, H200, OWN)}
    assert parts == whole and set(whole) == set(range(260))
    assert whole != {i: (c, s) for i, _, c, s in cases(260, 4, 0, 1, H200, OWN)}


def _small(index=0):
    profile = profiles()[index]
    return profile, draw(profile, random.Random(5), "small")


def test_a_program_makes_its_case_again(monkeypatch):
    profile, case = _small()
    seen = []
    monkeypatch.setattr(random_shapes, "check", lambda *a: (seen.append(a), ("", 0.0, "loop"))[1])
    exec(program(case, profile, "loop", 7, "cpu"), {})
    assert seen == [(case, "loop", 7, torch.device("cpu"))]
    monkeypatch.setattr(random_shapes, "check", lambda *a: ("relative error 1", 1.0, "loop"))
    with pytest.raises(AssertionError, match="loop: relative error 1"):
        exec(program(case, profile, "loop", 7, "cpu"), {})


def test_a_right_backend_passes_and_a_wrong_one_is_told(monkeypatch):
    case = Case("x", Layout.RAGGED_M, (3, 0, 9), n=16, k=32, past=4)
    reason, error, who = random_shapes.check(case, "auto", 1, torch.device("cpu"))
    assert not reason and 0 < error <= 1 and who == "torch_grouped"

    def wrong(problem, device, request):
        chosen, config = original(problem, device, request)
        from dataclasses import replace

        return replace(chosen, run=lambda *a: chosen.run(*a).mul_(1.05)), config

    original = random_shapes.select
    monkeypatch.setattr(random_shapes, "select", wrong)
    assert "relative error" in random_shapes.check(case, "loop", 1, torch.device("cpu"))[0]


def test_summaries_of_parts_add_up():
    parts = [Summary(0, 4), Summary(0, 4)]
    for i, part in enumerate(parts):
        part.cases, part.runs["auto ragged_m bfloat16"] = 2, 2
        part.keep_worst("auto", {"of_allowed": 0.1 * (i + 1), "case": str(i)})
    whole = Summary(0, 4)
    for part in parts:
        whole.add(part.as_dict())
    assert whole.cases == 4 and whole.runs == {"auto ragged_m bfloat16": 4} and whole.worst["auto"]["case"] == "1"


@pytest.mark.parametrize(
    ("text", "code", "expected"),
    [
        ("9 cases right\n========= ERROR SUMMARY: 0 errors\n", 0, ("clean", 0)),
        ("9 cases right\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0, ("clean", 0)),
        ("========= Invalid __global__ write\n========= ERROR SUMMARY: 3 errors\n", 86, ("not clean", 3)),
        ("9 cases right\n========= RACECHECK SUMMARY: 2 hazards displayed (2 errors)\n", 86, ("not clean", 2)),
        ("AssertionError: m-plain\n========= ERROR SUMMARY: 0 errors\n", 1, ("wrong", 0)),
        ("========= Error: Device not supported. Please refer to the manual\n", 1, ("unsupported", None)),
        ("Traceback\nImportError: no\n", 1, ("wrong", None)),
        ("=========", None, ("timeout", None)),
    ],
)
def test_the_sanitizers_words_are_understood(text, code, expected):
    assert sanitize.verdict(text, code) == expected


def test_the_sanitizer_reaches_every_own_kernel():
    chosen = [c for c in sanitize.CASES if c.name.endswith(sanitize.ENDINGS)]
    assert {c.layout for c in chosen} == set(Layout)
    for backend in (b for b in OWN if b.name in sanitize.OWN):
        able = [c for c in chosen if backend.supports(problem_of(c, H200), H200) is None]
        assert len(able) >= 5, backend.name
