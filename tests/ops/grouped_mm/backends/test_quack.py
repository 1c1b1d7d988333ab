"""What quack can't, and how it is called: the kernel itself needs a Hopper GPU (tests/gpu)."""

import sys
from dataclasses import replace
from importlib import metadata
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch

from expertile.device import Device
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.backends import quack
from expertile.ops.grouped_mm.problem import Layout, Problem
from tests.ops.grouped_mm.cases import CASES, check, expected, make, poisoned_out

BACKEND = quack.BACKEND
H200 = Device.by_name("h200")
BF16 = torch.bfloat16
PLAIN = Problem(Layout.RAGGED_M, 4, 100, 64, 128, BF16, BF16, (128, 1), (64 * 128, 1, 128))
WGRAD = Problem(Layout.RAGGED_K, 4, 64, 32, 100, BF16, BF16, (1, 64), (32, 1))
BATCHED = Problem(Layout.BATCHED, 4, 16, 64, 128, BF16, BF16, (16 * 128, 128, 1), (64 * 128, 1, 128))


def gemm(a, b, out, bias, tuned, cu_seqlens_m=None, cu_seqlens_k=None):
    """quack.gemm_interface.gemm by its documentation: what it asserts, and its result, on the CPU."""
    cu = cu_seqlens_m if cu_seqlens_m is not None else cu_seqlens_k
    assert cu is None or (cu.dtype is torch.int32 and cu[0] == 0 and cu.dim() == 1)
    ends = [] if cu is None else cu.tolist()
    if cu_seqlens_m is not None:
        assert a.stride(-1) == out.stride(-1) == 1 and b.dim() == 3
        views = [(a[s:e], b[g], out[s:e]) for g, (s, e) in enumerate(pairwise(ends))]
    elif cu_seqlens_k is not None:
        assert a.stride(-2) == 1 and b.stride(-1) == 1 and out.dim() == 3
        views = [(a[:, s:e], b[s:e], out[g]) for g, (s, e) in enumerate(pairwise(ends))]
    else:
        views = list(zip(a, b, out, strict=True))
    for g, (x, y, z) in enumerate(views):
        z.copy_(x.float() @ y.float() + (0.0 if bias is None else bias[g].float()))
    gemm.tuned = tuned


def gemm_with(a, b, out, *, C, bias, config, **cu_seqlens):
    """quack.gemm_interface.gemm_tuned.fn, which takes a configuration."""
    assert C is None
    gemm(a, b, out, bias, config, **cu_seqlens)


@pytest.fixture
def installed(monkeypatch):
    """quack 0.6.5, as far as it is called."""
    interface, configs = ModuleType("quack.gemm_interface"), ModuleType("quack.gemm_config")
    interface.gemm, interface.gemm_tuned = gemm, SimpleNamespace(fn=gemm_with)
    configs.GemmConfig = SimpleNamespace
    monkeypatch.setitem(sys.modules, "quack", ModuleType("quack"))
    monkeypatch.setitem(sys.modules, "quack.gemm_interface", interface)
    monkeypatch.setitem(sys.modules, "quack.gemm_config", configs)
    monkeypatch.setattr(quack, "find_spec", lambda name: object())
    of_version(monkeypatch, "0.6.5")
    yield
    of_version(monkeypatch, "0.6.5")


def of_version(monkeypatch, version):
    monkeypatch.setattr(metadata, "version", lambda name: version)
    quack._takes_tiles.cache_clear()
    quack._gemm_config.cache_clear()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_arguments_of_each_case(case, installed):
    a, b, offs, bias = make(case)
    problem = Problem.from_tensors(a, b, offs, bias, case.out_dtype)
    reason = BACKEND.supports(problem, H200)
    if reason is not None:
        pytest.skip(reason)
    out = poisoned_out(case)
    default, untuned, *tiles = BACKEND.configs(problem, H200)
    assert BACKEND.run(problem, Operands(a, b, offs, bias), default, out) is out
    check(case, out, expected(case, a, b, offs, bias))
    assert gemm.tuned is True
    BACKEND.run(problem, Operands(a, b, offs, bias), untuned, out)
    assert gemm.tuned is False
    for config in tiles:
        out = poisoned_out(case)
        BACKEND.run(problem, Operands(a, b, offs, bias), config, out)
        check(case, out, expected(case, a, b, offs, bias))
        given = gemm.tuned
        assert (given.tile_m, given.tile_n) == (config.block_m, config.block_n)
        assert (given.cluster_m, given.cluster_n, given.pingpong) == (
            config.cluster_m,
            config.cluster_n,
            config.pingpong,
        )


def test_tiles_are_those_of_hopper_and_of_a_quack_that_takes_them(installed, monkeypatch):
    assert len(BACKEND.configs(PLAIN, H200)) == 6
    assert len(BACKEND.configs(PLAIN, Device.by_name("b200"))) == 2
    for version in ("0.5.3", "0.6.4", "main"):
        of_version(monkeypatch, version)
        assert len(BACKEND.configs(PLAIN, H200)) == 2


@pytest.mark.parametrize(
    "problem, device, reason",
    [
        (PLAIN, H200, None),
        (WGRAD, H200, None),
        (BATCHED, H200, None),
        (replace(PLAIN, b_strides=(64 * 128, 64, 1)), H200, None),
        (replace(PLAIN, out_dtype=torch.float32, has_bias=True), H200, None),
        (PLAIN, Device.by_name("b200"), None),
        (PLAIN, Device.by_name("a100"), "needs sm_90"),
        (PLAIN, Device.current("cpu"), "needs sm_90"),
        (replace(PLAIN, dtype=torch.float32), H200, "dtype must be"),
        (replace(PLAIN, layout=Layout.RAGGED_N), H200, "ragged N"),
        (replace(PLAIN, k=0), H200, "at least 1"),
        (replace(PLAIN, a_aligned=False), H200, "needs a to start"),
        (replace(PLAIN, b_aligned=False), H200, "needs b to start"),
        (replace(PLAIN, a_strides=(1, 100)), H200, "a ragged m"),
        (replace(PLAIN, a_strides=(129, 1)), H200, "a has (129, 1)"),
        (replace(PLAIN, a_strides=(0, 1)), H200, "a has (0, 1)"),
        (replace(PLAIN, b_strides=(61 * 128 + 1, 1, 128)), H200, "b has"),
        (replace(PLAIN, n=61, b_strides=(61 * 128, 1, 128)), H200, "rows of the result"),
        (replace(WGRAD, a_strides=(104, 1)), H200, "a ragged k"),
        (replace(WGRAD, b_strides=(1, 104)), H200, "a ragged k"),
    ],
)
def test_supports(problem, device, reason, installed):
    got = BACKEND.supports(problem, device)
    assert got is None if reason is None else got is not None and reason in got, got


def test_says_what_to_install(monkeypatch):
    monkeypatch.setattr(quack, "find_spec", lambda name: None)
    assert "quack-kernels" in BACKEND.supports(PLAIN, H200)
