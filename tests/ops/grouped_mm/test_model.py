"""The analytic model: more work never takes less time, and nobody waits for the GPU unknowingly."""

import itertools

import pytest

from expertile.device import Device
from expertile.lab.race.workloads import ragged_m
from expertile.ops.grouped_mm.backends import BACKENDS, by_name
from expertile.ops.grouped_mm.model import estimate, modelled_seconds, synchronises

GPUS = [Device.by_name(n) for n in ("h200", "a100", "rtx 3090", "rtx 4090", "l40s", "h100", "b200")]


def problem(rows=1024, groups=8, k=1024, n=1024, dtype="bf16"):
    sizes = tuple(rows // groups + (g < rows % groups) for g in range(groups))
    return ragged_m("x", "", sizes, k, n, dtype).problem("cuda").with_sizes(None)


@pytest.mark.parametrize("device", GPUS, ids=lambda d: d.slug)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if b.speed], ids=lambda b: b.name)
def test_more_is_never_faster(backend, device):
    def seconds(**shape):
        return modelled_seconds(backend, problem(**shape), device, backend.speed)

    for field, values in (
        ("rows", (1, 8, 9, 64, 100, 1000, 5000, 70000)),
        ("k", (64, 512, 8192)),
        ("n", (64, 512, 8192)),
    ):
        times = [seconds(**{field: v}) for v in values]
        assert all(a <= b for a, b in itertools.pairwise(times)), field


def test_an_unknown_backend_has_no_estimate():
    made_up = by_name("loop").__class__("made-up", "", lambda p, d: None, lambda p, d: ((),), lambda *a: a[1].a)
    assert estimate(made_up, problem(), GPUS[0]).seconds is None


def test_who_waits_for_the_gpu():
    def waits(dtype, device):
        return {b.name for b in BACKENDS if synchronises(b, problem(dtype=dtype), device)}

    h200, a100 = GPUS[:2]
    assert waits("bf16", h200) == {"loop", "padded_bmm", "cublas_grouped"}
    assert waits("fp16", h200) == waits("bf16", a100) == {"loop", "padded_bmm", "cublas_grouped", "torch_grouped"}


def fastest(device, **shape):
    able = [b for b in BACKENDS if b.speed and not b.reads_offs_on_host and not b.supports(problem(**shape), device)]
    return min(able, key=lambda b: modelled_seconds(b, problem(**shape), device, b.speed)).name


@pytest.mark.parametrize("device", [GPUS[0], GPUS[5]], ids=lambda d: d.slug)
def test_at_the_memory_bound_the_better_pipeline_wins_unless_groups_have_a_row_each(device):
    """H100, 2026-11: this layer took 1.39 ms with triton_pointer's products; SonicMoE 1.12."""
    for n in (512, 1536):
        assert fastest(device, groups=128, rows=196608, k=256, n=n) == "gluon_hopper"
    assert fastest(device, groups=128, rows=128, k=2048, n=1536) == "triton_pointer"
