"""Default configs of gluon_hopper: those measured best, and all of them fit."""

from dataclasses import replace

import pytest

from expertile.device import Device
from expertile.ops.attention.backends import _hopper_configs as configs
from expertile.ops.attention.problem import Problem
from tests.ops.attention.cases import Case, make, on_gpu

H200 = Device.by_name("h200")
SMALL = on_gpu(make(Case("small", 16, 16)).problem)


def _of(length: int, dim: int, causal: bool) -> Problem:
    return replace(
        SMALL,
        batch=4,
        heads=16,
        kv_heads=16,
        q_len=length,
        k_len=length,
        q_rows=4 * length,
        k_rows=4 * length,
        head_dim=dim,
        causal=causal,
    )


@pytest.mark.parametrize("dim", [32, 64, 72, 128, 256])
@pytest.mark.parametrize("length", [1, 300, 1024, 2048, 4096, 16384, 2**20])
@pytest.mark.parametrize("causal", [False, True])
def test_defaults_come_first_and_fit(dim: int, length: int, causal: bool) -> None:
    problem, padded = _of(length, dim, causal), configs.padded_dim(dim)
    forward = configs.forward_configs(problem, H200)
    assert len(set(forward)) == len(forward) > 1
    assert all(c.smem_bytes(padded) <= H200.smem_bytes for c in forward)
    others = configs.forward_configs(_of(512, dim, causal), H200)
    assert set(forward) == set(others), "every length offers the same configs"
    if dim <= 128:
        backward = configs.backward_configs(problem, H200)
        assert all(max(x.dkdv.smem_bytes(padded), x.dq.smem_bytes(padded)) <= H200.smem_bytes for x in backward)
        of_dkdv, of_dq = (configs._DKDV_64, configs._DQ_64) if padded == 64 else (configs._DKDV_128, configs._DQ_128)
        assert {x.dkdv for x in backward} == set(of_dkdv.values()) and {x.dq for x in backward} == set(of_dq.values())


@pytest.mark.parametrize(
    ("length", "dim", "causal", "name"),
    [
        (256, 64, False, "grid"),
        (512, 64, False, "two consumers"),
        (1024, 64, False, "two consumers"),
        (2048, 64, True, "two consumers"),
        (4096, 64, True, "three consumers"),
        (4096, 64, False, "three consumers"),
        (256, 128, True, "grid"),
        (512, 128, True, "64 keys"),
        (4096, 128, True, "128 keys"),
        (4096, 80, False, "128 keys"),
    ],
)
def test_forward_defaults(length: int, dim: int, causal: bool, name: str) -> None:
    of = configs._FORWARD_64 if dim == 64 else configs._FORWARD_128
    assert configs.forward_configs(_of(length, dim, causal), H200)[0] == of[name]


def test_three_consumers_need_tiles_enough() -> None:
    """The same length with fewer heads or sequences, or short sequences of as many rows: two consumers."""
    long = _of(4096, 64, True)
    of = configs._FORWARD_64
    assert configs.forward_configs(replace(long, heads=8), H200)[0] == of["two consumers"]
    assert configs.forward_configs(replace(long, heads=8, causal=False), H200)[0] == of["three consumers"]
    few = replace(long, packed=True, q_rows=4096, k_rows=4096)
    assert configs.forward_configs(few, H200)[0] == of["two consumers"]
    short = replace(long, batch=64, q_len=1024, k_len=1024, q_rows=65536, k_rows=65536)
    assert configs.forward_configs(short, H200)[0] == of["two consumers"]


@pytest.mark.parametrize(
    ("length", "dim", "causal", "dkdv", "dq"),
    [
        (256, 64, False, "plain", "plain"),
        (1024, 64, False, "ahead, two buffers", "plain"),
        (4096, 64, False, "ahead", "ahead"),
        (4096, 64, True, "ahead, two buffers", "ahead"),
        (512, 128, False, "two buffers", "plain"),
        (4096, 128, False, "two buffers", "128 keys"),
        (16384, 128, False, "two buffers", "grid"),
        (2048, 128, True, "grid", "grid"),
        (16384, 128, True, "grid", "128 keys"),
    ],
)
def test_backward_defaults(length: int, dim: int, causal: bool, dkdv: str, dq: str) -> None:
    of_dkdv, of_dq = (configs._DKDV_64, configs._DQ_64) if dim == 64 else (configs._DKDV_128, configs._DQ_128)
    want = configs.BackwardConfig(of_dkdv[dkdv], of_dq[dq])
    assert configs.backward_configs(_of(length, dim, causal), H200)[0] == want


def test_each_pass_goes_by_what_it_goes_over() -> None:
    """The forward and dQ over keys, dK and dV over queries."""
    short, long = _of(256, 64, False), _of(4096, 64, False)
    mixed = replace(short, k_len=4096)
    assert configs.forward_configs(mixed, H200)[0] == configs._FORWARD_64["two consumers"]
    assert configs.forward_configs(short, H200)[0] == configs._FORWARD_64["grid"]
    backward = configs.backward_configs(mixed, H200)[0]
    assert backward.dkdv == configs.backward_configs(short, H200)[0].dkdv
    assert backward.dq == configs.backward_configs(long, H200)[0].dq
