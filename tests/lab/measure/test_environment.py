"""What records say about where they were made."""

import re
from dataclasses import replace

import torch

from expertile.device import Device
from expertile.lab.measure.clocks import Clocks
from expertile.lab.measure.env import timestamp, with_clocks
from expertile.lab.measure.environment import capture_env, new_run_id, same_machine
from expertile.version import __version__, commit


def test_environment_of_this_process():
    env = capture_env(Device.current("cpu"))
    assert env.gpu == Device.current("cpu").name
    assert env.torch == torch.__version__ and env.driver is None
    assert (env.expertile, env.commit) == (__version__, commit())
    assert env.sm_clock_mhz is env.power_w is env.throttle is None


def test_clocks_of_a_measurement():
    env = capture_env(Device.current("cpu"))
    throttled = with_clocks(env, Clocks(1500.0, 700.0, ("sw_power_cap", "hw_slowdown")))
    assert (throttled.sm_clock_mhz, throttled.power_w) == (1500.0, 700.0)
    assert throttled.throttle == "sw_power_cap,hw_slowdown"
    assert with_clocks(env, Clocks(1500.0, 700.0)).throttle == ""  # read, and none
    assert with_clocks(env, Clocks()).throttle is None  # not read


def test_same_machine_ignores_clocks_and_nothing_else():
    env = capture_env(Device.current("cpu"))
    assert same_machine(env, with_clocks(env, Clocks(1500.0, 700.0)))
    assert not same_machine(env, replace(env, torch="0.1"))
    assert not same_machine(env, replace(env, gpu="another"))
    assert not same_machine(env, replace(env, commit="0123abcd4567+dirty"))


def test_ids_and_dates():
    assert re.fullmatch(r"[0-9a-f]{8}", new_run_id()) and new_run_id() != new_run_id()
    assert re.fullmatch(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z", timestamp())
