"""The three experiments: their cases, and records of a small run."""

import pytest
import torch

from expertile.device import Device
from expertile.lab.bench.diagnose import Case, diagnose, experiments
from expertile.lab.bench.diagnosis import conclude
from expertile.lab.race.record import read

H200 = Device.by_name("h200")


def test_the_split_products_have_equal_flops_and_the_reports_has_not():
    split = experiments(H200)[0]
    flops = [c.work.flops for c in split]
    assert flops[0] == flops[1] == flops[2] == flops[3] == 2 * 2048**3
    assert {c.how for c in split} == {"mm", "bmm", "loop"}
    odd = split[4]
    assert (odd.m, odd.n, odd.k) == (2896, 2896, 2896)
    assert odd.work.flops / flops[0] == pytest.approx(2.83, abs=0.005)
    assert odd.m * odd.n == pytest.approx(8 * 1024**2, rel=1e-3)


def test_dtypes_follow_the_device():
    names = {c.dtype for group in experiments(H200)[1:-1] for c in group}
    assert names == {"fp16", "bf16", "tf32", "fp32"}
    volta = {c.dtype for group in experiments(Device.by_name("v100"))[1:-1] for c in group}
    assert volta == {"fp16", "fp32"}


def test_measures_on_the_cpu_and_writes_records(tmp_path, monkeypatch):
    small = (
        (Case("mm", 1, 32, 32, 32, "fp32"), Case("loop", 8, 16, 16, 16, "fp32"), Case("bmm", 8, 16, 16, 16, "fp32")),
        (Case("mm", 1, 32, 32, 32, "bf16"), Case("add", 64, 1, 1, 1, "fp32")),
    )
    monkeypatch.setattr("expertile.lab.bench.diagnose.experiments", lambda device: small)
    path = tmp_path / "diagnose.jsonl"
    found = list(diagnose("cpu", quick=True, out_path=path))
    assert [r.status for r in found] == ["ok"] * 5, [r.reason for r in found]
    assert read(path) == found
    assert {r.policy for r in found} == {"eager"} and len({r.run for r in found}) == 1
    assert len(conclude(found)) >= 2


def test_a_wrong_product_has_no_time(monkeypatch):
    case = Case("mm", 1, 32, 32, 32, "fp32")
    monkeypatch.setattr("expertile.lab.bench.diagnose.experiments", lambda device: ((case,),))
    monkeypatch.setattr(torch, "mm", lambda x, y: x * 2)
    (found,) = diagnose("cpu", quick=True)
    assert found.status == "wrong" and found.time_s is None
