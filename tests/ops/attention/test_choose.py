"""choose is a pure function of the problem and the device, and says why; rates are those measured."""

from dataclasses import replace

import pytest
import torch

from expertile.device import Device
from expertile.ops.attention import rates
from expertile.ops.attention.backends import BACKENDS, by_name
from expertile.ops.attention.choose import _MARGIN, _ORDER, choose
from expertile.ops.attention.problem import Problem
from tests.ops.attention.cases import Case, make, on_gpu

H200, H100, A100, CPU = (Device.by_name("h200"), Device.by_name("h100"), Device.by_name("a100"), Device.current("cpu"))
DENSE = on_gpu(make(Case("dense", 64, 64, dim=64, causal=True)).problem)
PACKED = on_gpu(make(Case("packed", (40, 24), (40, 24), dim=64, causal=True)).problem)
TABLES = {False: rates.FORWARD, True: rates.BACKWARD}


def _of(length: int, dim: int, causal: bool) -> Problem:
    strides = (16 * length * dim, length * dim, dim)
    return replace(
        DENSE,
        batch=4,
        heads=16,
        kv_heads=16,
        q_len=length,
        k_len=length,
        head_dim=dim,
        causal=causal,
        q_rows=4 * length,
        k_rows=4 * length,
        q_strides=strides,
        k_strides=strides,
        v_strides=strides,
    )


@pytest.mark.parametrize("backward", [False, True])
def test_the_highest_measured_rate_wins(backward) -> None:
    for (dim, causal), row in TABLES[backward].items():
        for i, length in enumerate(rates.LENGTHS):
            chosen = choose(_of(length, dim, causal), H200, backward)
            measured = {name: points[min(i, len(points) - 1)] for name, points in row.items()}
            fastest = max(measured.values())
            least = fastest if chosen.backend.peer else fastest / _MARGIN
            assert measured[chosen.backend.name] >= least, (dim, causal, length)
            assert f"{chosen.backend.name}: {measured[chosen.backend.name]} TFLOP/s" in chosen.why
            assert "NVIDIA H200, 2026-" in chosen.why and f"length {length}" in chosen.why
            seconds = {c.backend: c.seconds for c in chosen.estimates if c.seconds is not None}
            assert set(seconds) == set(measured)
            assert {c.backend for c in chosen.estimates} == {b.name for b in BACKENDS}
            assert seconds[chosen.backend.name] <= _MARGIN * min(seconds.values())


def test_rows_are_as_long_as_they_were_measured() -> None:
    for table in TABLES.values():
        assert set(table) == {(dim, causal) for dim in (64, 128) for causal in (False, True)}
        for row in table.values():
            for name, points in row.items():
                assert by_name(name).name == name and 1 < len(points) <= len(rates.LENGTHS)
            assert len(row["gluon_hopper"]) == len(row["sdpa_cudnn"]) == len(rates.LENGTHS)


def test_rates_go_by_the_logarithm_of_the_length() -> None:
    low, high = (rates.rates(_of(n, 128, True), False)["sdpa_cudnn"] for n in (1024, 4096))
    between = rates.rates(_of(2048, 128, True), False)["sdpa_cudnn"]
    assert low < between < high
    points = rates.FORWARD[128, True]["sdpa_cudnn"]
    assert rates.rates(_of(8192, 128, True), False)["sdpa_cudnn"] == pytest.approx((points[4] + points[5]) / 2)
    assert rates.rates(_of(16, 128, True), False)["sdpa_cudnn"] == points[0]
    assert rates.rates(_of(10**6, 128, True), False)["sdpa_cudnn"] == points[-1]
    assert rates.rates(_of(1024, 96, True), False)["sdpa_cudnn"] == pytest.approx(low * 96 / 128)
    assert rates.length(replace(_of(1024, 64, True), k_len=4096)) == pytest.approx(2048)
    assert rates.length(PACKED) == pytest.approx(32)


def test_with_few_heads_other_rates_hold() -> None:
    many = _of(2048, 64, True)
    few = replace(many, heads=8, kv_heads=8)
    assert choose(many, H200).backend.name == "sdpa_cudnn" and choose(few, H200).backend.name == "gluon_hopper"
    (triton,) = (c for c in choose(few, H200).estimates if c.backend == "triton")
    assert triton.seconds is None and triton.reason == "can; not measured for such problems"
    for key, row in rates.FEW_HEADS.items():
        for name, points in row.items():
            assert len(points) == 3
            for length, rate in zip((1024, 2048, 4096), points, strict=True):
                problem = replace(_of(length, *key), heads=8, kv_heads=8)
                assert rates.rates(problem, False)[name] == rate
                assert rates.rates(problem, True) == rates.rates(_of(length, *key), True)
    for length in (256, 16384):
        other = rates.rates(_of(length, 64, True), False)
        assert rates.rates(replace(_of(length, 64, True), heads=8), False) == {x: other[x] for x in row}


def test_what_cudnn_does_not_take() -> None:
    long = _of(2048, 64, True)
    assert choose(long, H200).backend.name == "sdpa_cudnn"
    for problem in (replace(long, packed=True), replace(long, q_len=1984, q_rows=7936)):
        chosen = choose(problem, H200)
        assert chosen.backend.name == "gluon_hopper" and "; sdpa_cudnn would reach" in chosen.why
    assert choose(replace(long, head_dim=256), H200).backend.name == "gluon_hopper"


def test_deterministic_and_lse_gradients_stay_with_our_kernels() -> None:
    for problem in (replace(DENSE, deterministic=True), replace(_of(4096, 128, False), lse_grad=True)):
        assert not choose(problem, H200, True).backend.peer
    with_flag = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        assert make(Case("one", 8, 8)).problem.deterministic
    finally:
        torch.use_deterministic_algorithms(with_flag)


def test_other_gpus_are_not_measured() -> None:
    assert choose(DENSE, A100).backend.name == "sdpa_fa2"
    assert "not measured on NVIDIA A100" in choose(DENSE, A100).why
    same = choose(DENSE, H100)
    assert same.backend is choose(DENSE, H200).backend and "not measured on NVIDIA H100" in same.why
    assert "not measured on" not in choose(DENSE, H200).why
    odd = replace(DENSE, head_dim=36)
    assert choose(odd, A100).backend.name == "triton" and choose(odd, H200).backend.name == "triton"
    wide = choose(replace(DENSE, head_dim=256), H200, True)
    assert wide.backend.name == "sdpa_fa2" and "not measured at head dimension 256" in wide.why
    assert choose(replace(DENSE, dtype=torch.float32), H200).backend.name == "reference"
    assert choose(replace(DENSE, device_type="cpu"), CPU).backend.name == "reference"
    assert set(_ORDER) == {b.name for b in BACKENDS}


def test_nothing_can() -> None:
    with pytest.raises(ValueError, match="backend: none supports this problem .*gluon_hopper: takes bfloat16"):
        choose(replace(PACKED, dtype=torch.float32), H200)
