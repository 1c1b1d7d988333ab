import pytest
import torch

from expertile.device import DTYPES, Device, dtype_key, find_in_text, generous_peak, known_devices

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
        ("no GPU is named, 4096 rows", []),
    ],
)
def test_devices_are_found_in_text(text, names):
    assert [d.name for d in find_in_text(text)] == names


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
