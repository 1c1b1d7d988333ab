"""Clock readings, with a stand-in for NVML."""

import pytest
import torch

from expertile.lab.measure import clocks
from expertile.lab.measure.clocks import Clocks, clock_reader, summarize, throttle_reasons


class Nvml:
    NVML_CLOCK_SM = 1

    def nvmlDeviceGetClockInfo(self, handle, which):
        return 1755

    def nvmlDeviceGetPowerUsage(self, handle):
        return 698_500

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle):
        return 0x4 | 0x1

    def nvmlSystemGetDriverVersion(self):
        return "580.10"


def test_reading_in_the_units_of_a_record(monkeypatch):
    monkeypatch.setattr(clocks, "_handle", lambda device: ("handle", Nvml()))
    assert clock_reader(torch.device("cuda"))() == Clocks(1755.0, 698.5, ("sw_power_cap",))


def test_a_query_the_driver_refuses_is_left_out(monkeypatch):
    class Old(Nvml):
        nvmlDeviceGetCurrentClocksEventReasons = None  # absent before driver 535

        def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
            return 0x40

        def nvmlDeviceGetPowerUsage(self, handle):
            raise RuntimeError("not supported")

    monkeypatch.setattr(clocks, "_handle", lambda device: ("handle", Old()))
    assert clock_reader(torch.device("cuda"))() == Clocks(1755.0, None, ("hw_thermal_slowdown",))


def test_no_nvml_reads_nothing(monkeypatch):
    def absent(device):
        raise ImportError("no NVML")

    monkeypatch.setattr(clocks, "_handle", absent)
    assert clock_reader(torch.device("cuda"))() == Clocks()
    assert clock_reader(torch.device("cpu"))() == Clocks()


def test_driver_version(monkeypatch):
    monkeypatch.setattr(clocks, "_nvml", Nvml)
    assert clocks.driver_version() == "580.10"


def test_summary_is_the_median_and_every_reason_seen():
    readings = [Clocks(1700, 600.0), Clocks(1500, 700.0, ("sw_power_cap",)), Clocks(1600, None, ("hw_slowdown",))]
    assert summarize(readings) == Clocks(1600, 650.0, ("sw_power_cap", "hw_slowdown"))
    assert summarize([]) == Clocks()


@pytest.mark.parametrize(("bits", "names"), [(0, ()), (0x1 | 0x2, ()), (0x80 | 0x8, ("hw_slowdown", "hw_power_brake"))])
def test_idle_and_chosen_clocks_are_no_throttling(bits, names):
    assert throttle_reasons(bits) == names
