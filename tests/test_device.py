import subprocess
import sys

import pytest
import torch

from expertile.device import DTYPES, Device, dtype_key, find_in_text, generous_peak, known_devices
from expertile.device import __file__ as device_file

# Dense datasheet figures in TFLOP/s (NVIDIA datasheets and whitepapers, without sparsity).
DATASHEET = [
    ("A100", "bf16", 312),
    ("A100", "tf32", 156),
    ("A100", "fp32", 19.5),
    ("RTX 4090", "fp16", 165.2),
    ("RTX 4090", "fp32", 82.6),
    ("RTX 3090", "fp16", 71),
    ("V100", "fp32", 15.7),
    ("V100", "fp16", 125),
    ("L40S", "fp8", 733),
    ("T4", "fp16", 65),
    ("H100", "fp64", 67),
    ("MI300X", "fp16", 1307.4),
    ("MI300X", "fp8", 2614.9),
    ("MI250X", "fp64", 95.7),
    ("MI355X", "fp4", 10066),
    ("RTX 4060 Ti", "fp32", 22.1),
    ("A6000", "fp16", 154.8),
    ("RTX 5090", "fp4", 1676),
    ("RTX PRO 6000", "fp4", 2015),
    ("RX 7900 XTX", "fp16", 122.8),
    ("P100 SXM2", "fp32", 10.6),
]


@pytest.mark.parametrize("name, key, tflops", DATASHEET)
def test_peaks_follow_the_datasheets(name, key, tflops):
    peak = Device.by_name(name).peak(key)
    assert peak is not None
    assert peak / 1e12 == pytest.approx(tflops, rel=0.02)


def test_hopper_peak_is_at_the_boost_clock_so_above_the_datasheet():
    # The datasheet's 989 TFLOP/s are at 1.83 GHz; the part boosts to 1.98.
    assert 989e12 < Device.by_name("H200").peak("bf16") < 1.1 * 989e12


@pytest.mark.parametrize("device", known_devices(), ids=lambda d: d.slug)
def test_known_devices_are_complete_and_findable(device):
    assert device in find_in_text(device.name)
    assert set(device.peak_flops) <= set(DTYPES)
    assert device.memory_bps and device.memory_bytes > 1e9 and device.sm_count > 0
    ordered = [device.peak_flops[k] for k in ("fp32", "tf32", "fp16") if k in device.peak_flops]
    assert ordered == sorted(ordered)


@pytest.mark.parametrize(
    "text, names",
    [
        ("Hardware: NVIDIA GeForce RTX 3090 (Compute Capability 8.6)", ["NVIDIA GeForce RTX 3090"]),
        ("**Tesla V100-SXM2-32GB** GPU", ["Tesla V100-SXM2-32GB"]),
        ("B200 (SM100, ~4500 TFLOPs/s FP8 peak)", ["NVIDIA B200"]),
        ("on A100 40GB and then H100", ["NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3"]),
        ("RTX 3090 Ti", ["NVIDIA GeForce RTX 3090 Ti"]),
        ("RTX4060Ti and RTX-4070-Ti-Super", ["NVIDIA GeForce RTX 4060 Ti", "NVIDIA GeForce RTX 4070 Ti SUPER"]),
        ("an A6000 beside an RTX 6000 Ada", ["NVIDIA RTX A6000", "NVIDIA RTX 6000 Ada Generation"]),
        ("8x MI 300X, then A100-80G-PCIe", ["AMD Instinct MI300X", "NVIDIA A100 80GB PCIe"]),
        ("it took 3090 ms", []),
        ("no GPU is named, 4096 rows", []),
    ],
)
def test_devices_are_found_in_text(text, names):
    assert [d.name for d in find_in_text(text)] == names


def test_a_bare_number_is_a_gpu_only_where_one_is_asked_for():
    assert Device.by_name("4090").name == "NVIDIA GeForce RTX 4090"


def test_no_alias_is_two_parts():
    owners = {}
    for device in known_devices():
        for alias in device.aliases:
            assert owners.setdefault(alias, device) is device, alias
            assert find_in_text(alias) == [device], alias


@pytest.mark.parametrize(
    "name, key, tflops",
    [
        ("A100", "fp16", 624),
        ("H100", "fp8", 3958),
        ("MI300X", "fp8", 5229.8),
        ("V100", "fp16", None),
        ("H100", "fp32", None),
    ],
)
def test_sparse_peaks_follow_the_datasheets(name, key, tflops):
    peak = Device.by_name(name).sparse_peak(key)
    assert peak == (None if tflops is None else pytest.approx(tflops * 1e12, rel=0.1))


def test_facts_of_a_device_need_no_torch():
    code = "import sys; sys.modules['torch'] = None; import importlib.util as u\n"
    code += f"s = u.spec_from_file_location('device', {device_file!r}); m = u.module_from_spec(s)\n"
    code += "sys.modules['device'] = m; s.loader.exec_module(m); print(m.Device.by_name('MI300X').name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "AMD Instinct MI300X", done.stderr


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="gpu: no known device in 'abacus'; known: .*NVIDIA H200"):
        Device.by_name("abacus")


def test_geforce_fp16_has_a_more_generous_reading():
    device = Device.by_name("RTX 4090")
    assert generous_peak(device, "fp16") == pytest.approx(330.3e12, rel=0.01)
    assert generous_peak(Device.by_name("H200"), "fp16") == Device.by_name("H200").peak("fp16")
    assert generous_peak(Device.by_name("V100"), "bf16") is None


def test_dtype_keys():
    assert dtype_key(torch.float32) == "fp32"
    assert dtype_key(torch.float32, allow_tf32=True) == "tf32"
    assert dtype_key(torch.bfloat16, allow_tf32=True) == "bf16"
    with pytest.raises(ValueError, match=r"dtype: expected one of .*got torch\.int64"):
        dtype_key(torch.int64)


def test_this_cpu():
    device = Device.current("cpu")
    assert device.kind == "cpu" and device.memory_bps is None and device.capability is None
    assert device.peak("fp32") > 1e9 and device.l2_bytes > 2**16 and device.memory_bytes > 2**28
    assert not device.at_least(8, 0)


def test_compute_capability_order():
    assert Device.by_name("H200").at_least(9, 0)
    assert Device.by_name("RTX 4090").at_least(8, 0) and not Device.by_name("RTX 4090").at_least(9, 0)


def test_slug():
    assert Device.by_name("H200").slug == "nvidia-h200"
