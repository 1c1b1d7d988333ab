import pytest

from expertile.device import Device
from expertile.lab.audit.limits import cache_bytes, compute_limit, memory_limit

H100, V100, RTX4090, B200 = (Device.by_name(n) for n in ("h100", "v100", "rtx 4090", "b200"))


def test_the_fastest_format_where_none_is_named():
    assert compute_limit([H100], []).value == pytest.approx(H100.peak("fp8") * 1.03)


def test_named_formats_bound():
    assert compute_limit([H100], ["bf16"]).value == pytest.approx(H100.peak("bf16") * 1.03)
    assert compute_limit([V100], ["fp32"]).value == pytest.approx(V100.peak("fp32") * 1.03)
    assert compute_limit([H100], ["fp32"]).value == pytest.approx(H100.peak("tf32") * 1.03)


def test_generous_readings():
    assert compute_limit([RTX4090], ["fp16"]).value == pytest.approx(2 * RTX4090.peak("fp16") * 1.15)
    assert compute_limit([B200], ["fp4"]).value == pytest.approx(2 * B200.peak("fp8") * 1.03)
    assert compute_limit([H100], ["fp4"]).value == compute_limit([H100], ["fp8"]).value
    assert compute_limit([H100, V100], ["fp16"]).value == compute_limit([H100], ["fp16"]).value


def test_several_gpus_and_sparsity_multiply():
    one = compute_limit([H100], ["bf16"]).value
    assert compute_limit([H100], ["bf16"], gpus=8).value == pytest.approx(8 * one)
    assert compute_limit([H100], ["bf16"], sparse=True).value == pytest.approx(2 * one)
    assert memory_limit([H100], 2).value == pytest.approx(2 * H100.memory_bps * 1.02)
    assert cache_bytes([H100, V100], 2) == 2 * H100.l2_bytes


def test_nothing_known():
    assert compute_limit([], []) is None
    assert memory_limit([]) is None
    assert compute_limit([V100], ["fp64"]) is None
