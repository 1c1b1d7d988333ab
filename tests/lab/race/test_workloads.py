"""GroupedWorkload: validation, and shapes, strides, bytes and Problem agreeing with real tensors."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertile.lab.race.workloads import grouped, ragged_m, wgrad
from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ragged import offs_from_sizes


def _stored(shape, strides, dtype):
    return torch.empty_strided(shape, strides, dtype=dtype)


@st.composite
def _workloads(draw):
    layout = draw(st.sampled_from(list(Layout)))
    m, n, k = (draw(st.integers(1, 20)) for _ in range(3))
    if layout is Layout.BATCHED:
        sizes = [m] * draw(st.integers(1, 5))
    else:
        sizes = draw(st.lists(st.integers(0, 20), min_size=1, max_size=5))
        total = sum(sizes)
        m, n, k = (
            total if layout is ragged else size
            for ragged, size in ((Layout.RAGGED_M, m), (Layout.RAGGED_N, n), (Layout.RAGGED_K, k))
        )
    return grouped(
        "w",
        "test",
        layout,
        tuple(sizes),
        m,
        n,
        k,
        draw(st.sampled_from(("bf16", "fp16", "fp32"))),
        a_layout=draw(st.sampled_from(("mk", "km"))),
        b_layout=draw(st.sampled_from(("nk", "kn"))),
    )


@given(_workloads())
@settings(max_examples=150, deadline=None)
def test_workload_describes_real_tensors(w):
    a, b = _stored(w.a_shape, w.a_strides, w.torch_dtype), _stored(w.b_shape, w.b_strides, w.torch_dtype)
    offs = offs_from_sizes(w.group_sizes) if w.layout is not Layout.BATCHED else None
    from_tensors = Problem.from_tensors(a, b, offs, check=True)
    ours = w.problem("cpu")
    sizes = None if offs is None else ours.group_sizes
    same = dataclasses.replace(
        ours, group_sizes=sizes, a_aligned=from_tensors.a_aligned, b_aligned=from_tensors.b_aligned
    )
    # Torch gives a tensor without elements strides of its own.
    if a.numel() and b.numel():
        assert same == from_tensors
    assert ours.out_shape == w.out_shape == from_tensors.out_shape
    assert w.out_nbytes == torch.empty(w.out_shape, dtype=w.torch_dtype).nbytes
    assert w.memory_nbytes == a.nbytes + b.nbytes + w.out_nbytes


def test_weights_are_stored_nk_and_passed_transposed():
    w = ragged_m("w", "test", [3, 4], k=16, n=8, dtype="bf16")
    assert (w.a_shape, w.b_shape, w.out_shape) == ((7, 16), (2, 16, 8), (7, 8))
    assert w.b_strides == (128, 1, 16)
    assert dataclasses.replace(w, b_layout="kn").b_strides == (128, 8, 1)


def test_wgrad_is_the_gradient_of_the_weights():
    sizes = (5, 0, 3)
    w = wgrad("dw", "test", sizes, m=4, n=6, dtype="fp32")
    assert (w.a_shape, w.b_shape, w.out_shape, w.groups) == ((4, 8), (8, 6), (3, 4, 6), 3)
    assert (w.a_strides, w.b_strides) == ((1, 4), (6, 1))
    assert w.problem("cpu").work().flops == 2 * 8 * 4 * 6


def test_with_sizes_moves_the_total():
    assert ragged_m("w", "t", [0, 0], k=16, n=16, dtype="bf16").with_sizes([3, 4]).m == 7
    assert wgrad("w", "t", [0, 0], m=8, n=16, dtype="bf16").with_sizes([3, 4], name="x").k == 7
    batched = grouped("w", "t", Layout.BATCHED, (4, 4), 4, 8, 8, "bf16")
    with pytest.raises(ValueError, match="'w': expected a ragged layout, got batched"):
        batched.with_sizes([1, 2])


def test_shape_is_plain_json_and_tells_workloads_apart():
    import json

    w = ragged_m("w", "t", [3, 4], k=16, n=8, dtype="bf16", routing="zipf(1) seed=0")
    assert json.loads(json.dumps(w.shape())) == w.shape()
    assert w.shape()["group_sizes"] == [3, 4]
    assert w.with_sizes([4, 3]).shape() != w.shape()
    assert dataclasses.replace(w, b_layout="kn").shape() != w.shape()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": ""}, "name: expected a non-empty string"),
        ({"dtype": "fp8"}, "dtype: expected one of fp32, bf16, fp16, got 'fp8'"),
        ({"dtype": "bfloat16"}, "dtype: expected one of fp32, bf16, fp16, got 'bfloat16'"),
        ({"a_layout": "x"}, "a_layout: expected one of mk, km, got 'x'"),
        ({"b_layout": "x"}, "b_layout: expected one of nk, kn, got 'x'"),
        ({"group_sizes": ()}, "group_sizes: expected at least one group, got none"),
        ({"group_sizes": (8, -1)}, r"group_sizes\[1\]: expected 0 or more, got -1"),
        ({"group_sizes": (3, 3)}, "m: expected 6, the sum of group_sizes, got 7"),
        ({"n": 0}, "n: expected 1 or more, got 0"),
        (
            {"layout": Layout.BATCHED},
            r"group_sizes: expected 7 \(m\) for every group of a batched product, got \[3, 4\]",
        ),
    ],
)
def test_errors_name_the_field(change, message):
    w = ragged_m("w", "t", [3, 4], k=16, n=8, dtype="bf16")
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(w, **change)
