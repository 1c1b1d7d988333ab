import pytest

from expertile.lab.audit.vocabulary import device_key, devices, formats, gpu_count, operations


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("MoE Grouped GEMM", ["moe"]),
        ("grouped_mm", ["grouped_gemm"]),
        ("Flash Attention softmax", ["attention"]),
        ("layer_norm.py", ["layer_norm"]),
        ("Softmax and matmul", ["softmax", "gemm"]),
        ("conv2d", ["unsupported"]),
        ("hello", []),
    ],
)
def test_operations(text, found):
    assert operations(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("FP8 e4m3fn input, BF16 output", ["bf16", "fp8"]),
        ("HGEMM", ["fp16"]),
        ("from 16-bit to 4-bit", ["fp16", "int4"]),
        ("BF16 is a 16-bit format", ["bf16"]),
        ("W8A8", ["int8"]),
        ("", []),
    ],
)
def test_formats(text, found):
    assert formats(text) == found


def test_an_unknown_dtype_is_named():
    assert device_key("bfloat16") == "bf16"
    with pytest.raises(ValueError, match="dtype: expected one of"):
        device_key("int3")


@pytest.mark.parametrize(
    ("text", "known", "unknown"),
    [
        ("GPU: RTX4090 (recommended)", ["NVIDIA GeForce RTX 4090"], 0),
        ("Tesla V100-SXM2-32GB", ["Tesla V100-SXM2-32GB"], 0),
        ("RTX 3090 beside an H100", ["NVIDIA GeForce RTX 3090", "NVIDIA H100 80GB HBM3"], 0),
        ("NVIDIA L4", ["NVIDIA L4"], 0),
        ("H100 NVL", ["NVIDIA H100 NVL"], 0),
        ("A100 80GB PCIe", ["NVIDIA A100 80GB PCIe"], 0),
        ("RTX 4080 Super", [], 1),
        ("MI300X", [], 1),
        ("0.3080 ms, 4090 tokens", [], 0),
    ],
)
def test_devices(text, known, unknown):
    found, others = devices(text)
    assert [d.name for d in found] == known
    assert len(others) == unknown


def test_gpu_counts():
    assert gpu_count(["8x H100, TP=4"]) == 8
    assert gpu_count(["tensor parallel size: 16"]) == 16
    assert gpu_count(["pp512", "22.6 GPU-hours"]) == 1
