"""The three experiments: what is compared, and which arithmetic a device has."""

import pytest
import torch

from expertile.device import Device
from expertile.lab.bench.run import run
from expertile.lab.operators.diagnose import MATH, OPERATORS, SPLIT, larger, workloads

BY_NAME = {w.name: w for w in workloads()}


def test_the_split_products_have_equal_flops_and_the_larger_has_not():
    w = BY_NAME["split-1024-fp16"]
    works = {form.name: form.work(w) for form in SPLIT}
    assert {work.flops for work in works.values()} == {2.0 * 2048**3}
    odd = MATH[0].work(BY_NAME["math-2896-fp16"])
    assert odd.flops / 2048**3 / 2 == pytest.approx(2.83, abs=0.005)
    assert larger(1024) ** 2 == pytest.approx(8 * 1024**2, rel=1e-3)


def test_arithmetic_follows_the_device():
    def known(device):
        (rival,) = OPERATORS[1].rivals
        return {w["math"] for w in workloads() if w.op == "diagnose_math" and rival.supports(w, device) is None}

    assert known(Device.by_name("h200")) == {"fp16", "bf16", "tf32", "fp32"}
    assert known(Device.by_name("v100")) == {"fp16", "fp32"}
    assert OPERATORS[1].dtype_key(BY_NAME["math-2048-tf32"]) == "tf32"


def test_all_are_right_on_a_cpu_and_say_what_they_compute():
    chosen = [BY_NAME[name] for name in ("split-256-fp32", "math-512-bf16", "launch-64-fp32", "add-1-fp32")]
    found = [r for r in run(chosen, (), operators=OPERATORS, rounds=3) if r.backend != "copy"]
    assert {r.status for r in found} == {"ok"} and len(found) == 4 + 1 + 2 + 1
    sizes = {(r.workload, r.backend): r.config for r in found}
    assert sizes["diagnose/split-256-fp32", "one long"] == {"m": 2048, "n": 256, "k": 256, "count": 1, "launches": 1}
    assert sizes["diagnose/launch-64-fp32", "torch.mm loop"]["launches"] == 64


def test_a_wrong_product_has_no_time(monkeypatch):
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda x, y, **out: real(x, y, **out) if out else x * 2)
    (found,) = (r for r in run([BY_NAME["math-512-fp32"]], (), operators=OPERATORS, rounds=3) if r.backend != "copy")
    assert found.status == "wrong" and found.time_s is None
