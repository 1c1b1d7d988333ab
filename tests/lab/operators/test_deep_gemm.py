"""DeepGEMM as a rival, without DeepGEMM: what it is handed in either layout, and what is asked of its results."""

import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from expertile.device import Device
from expertile.formats.fp8 import dequantize
from expertile.lab.operators import operators, presets
from expertile.lab.race.gate import judge

CPU, H200 = torch.device("cpu"), Device.by_name("h200")
SMALL = next(w for w in presets()["fp8-large"]() if w.name == "fp8-small")
EVEN = replace(
    SMALL, dims=(("groups", 3), ("tokens", 384), ("top_k", 1), ("n", 192), ("k", 256), ("routing", "balanced"))
)


def _product(a, scale_a, weight, scale_b):
    return (dequantize(a, scale_a, (1, 128)) @ dequantize(weight, scale_b, (128, 128)).t()).bfloat16()


def _contiguous(left, right, out, of_rows):
    (a, scale_a), (weights, scale_b) = left, right
    assert scale_a.stride(0) == 1 and a.shape[0] % 128 == 0 and of_rows.shape[0] == a.shape[0]
    for start in range(0, a.shape[0], 128):
        rows = slice(start, start + 128)
        (group,) = set(of_rows[rows].tolist())
        out[rows] = _product(a[rows], scale_a[rows], weights[group], scale_b[group])


def _masked(left, right, out, counts, expected):
    (a, scale_a), (weights, scale_b) = left, right
    assert scale_a.stride(1) == 1 and a.shape[1] % 128 == 0 and expected > 0
    for group, count in enumerate(counts.tolist()):
        made = _product(a[group, :count], scale_a[group, :count], weights[group], scale_b[group])
        out[group, :count] = made


@pytest.fixture
def deep_gemm(monkeypatch):
    module = ModuleType("deep_gemm")
    module.get_mn_major_tma_aligned_tensor = lambda x: x.transpose(-2, -1).contiguous().transpose(-2, -1)
    module.m_grouped_fp8_gemm_nt_contiguous = _contiguous
    module.m_grouped_fp8_gemm_nt_masked = _masked
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    return module


def _judged(w, name):
    operator = operators()["scaled_grouped_mm"]
    rival = next(r for r in operator.rivals if r.name == name)
    inputs = operator.make_inputs(w, CPU, 0)
    return judge(rival, w, inputs, rival.reference(w, inputs), operator.tolerance(w))


@pytest.mark.parametrize("w", [SMALL, EVEN], ids=["uneven", "even"])
@pytest.mark.parametrize("name", ["deepgemm", "deepgemm-masked"])
def test_both_layouts_pass_the_gate(w, name, deep_gemm):
    gate = _judged(w, name)
    assert gate.ok, gate.reason


@pytest.mark.parametrize(
    ("name", "function"),
    [("deepgemm", "m_grouped_fp8_gemm_nt_contiguous"), ("deepgemm-masked", "m_grouped_fp8_gemm_nt_masked")],
)
def test_a_wrong_row_is_noticed(name, function, deep_gemm, monkeypatch):
    real = getattr(deep_gemm, function)

    def wrong(left, right, out, *rest):
        real(left, right, out, *rest)
        out.view(-1, out.shape[-1])[0] *= 1.5

    monkeypatch.setattr(deep_gemm, function, wrong)
    assert not _judged(SMALL, name).ok


def test_what_it_refuses(deep_gemm):
    deep_gemm.__spec__ = object()
    rivals = {r.name: r for r in operators()["scaled_grouped_mm"].rivals}
    assert "multiple of 128" in rivals["deepgemm"].supports(SMALL, H200)
    assert rivals["deepgemm"].supports(EVEN, H200) is None and rivals["deepgemm-masked"].supports(EVEN, H200) is None
    assert "9.0" in rivals["deepgemm"].supports(EVEN, Device.by_name("b200"))
    many = replace(
        EVEN, dims=(*EVEN.dims[:1], ("tokens", 2**22), *EVEN.dims[2:3], ("n", 8192), ("k", 8192), EVEN.dims[-1])
    )
    assert "16 GiB" in rivals["deepgemm-masked"].supports(many, H200)
