"""What a CPU grants and reaches."""

from dataclasses import replace

import pytest
import torch

from expertile.device import Device
from expertile.lab.measure import cpu
from expertile.lab.measure.cpu import cpu_reader, quota, with_measured_roofs


@pytest.mark.parametrize(
    ("text", "cores"), [("max 100000", None), ("150000 100000", 1.5), ("", None), ("-1 100000", None)]
)
def test_the_quota_of_a_cgroup_in_cores(text, cores, tmp_path):
    (tmp_path / "cpu.max").write_text(text)
    assert quota(tmp_path) == cores


def test_the_quota_of_the_first_cgroup_version(tmp_path):
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("250000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert quota(tmp_path) == 2.5


def test_a_reading_says_whether_the_quota_stopped_the_process_since_the_last(tmp_path):
    stat = tmp_path / "cpu.stat"
    stat.write_text("usage_usec 5\nnr_throttled 3\n")
    read = cpu_reader(tmp_path)
    assert read().throttle == ()
    stat.write_text("usage_usec 9\nnr_throttled 4\n")
    assert read().throttle == ("cgroup_quota",)
    assert read().throttle == ()


def test_roofs_are_measured_and_what_is_not_measured_is_not_known():
    here = replace(Device.current("cpu"), l2_bytes=2**20)
    roofs = with_measured_roofs(here, {"fp32", "fp8"})
    assert set(roofs.peak_flops) == {"fp32"}
    assert 1e8 < roofs.peak("fp32") < here.peak("fp32")
    assert 1e8 < roofs.memory_bps < 1e13


@pytest.mark.parametrize(("rate", "sides"), [(1e9, 1), (1e11, 2)])
def test_the_large_product_is_left_out_where_it_takes_long(rate, sides, monkeypatch):
    met = []
    monkeypatch.setattr(cpu, "_reached", lambda side, *_: met.append(side) or rate * len(met))
    assert cpu._peak.__wrapped__(torch.float16) == rate * sides
    assert met == [cpu._LITTLE, cpu._SIDE][:sides]
