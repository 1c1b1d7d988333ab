"""triton_int4 over the shared case table, on the CPU through Triton's interpreter."""

import pytest

from tests.support import interpreter

if not interpreter.active():

    def test_under_the_interpreter():
        interpreter.run_file_interpreted(__file__)

else:
    import torch

    from expertile.device import Device
    from expertile.formats.int4 import Int4Weight
    from expertile.formats.mxfp4 import Mxfp4Weight
    from expertile.formats.mxfp4_fp8 import Mxfp4Fp8Weight
    from expertile.ops.weight_only_mm.backends import triton_int4
    from expertile.ops.weight_only_mm.dequantize import dequantize_on_gpu
    from tests.ops.weight_only_mm.cases import BF16, CASES, FP16, check, make, poisoned_out, problem_of

    interpreter.repair()
    BACKEND, C = triton_int4.BACKEND, triton_int4.Config

    CONFIGS = {"pointer": C(32, 64, 4, 2, group_m=2), "sync": C(16, 64, 4, 2, products="mma.sync")}
    FEW = (
        "mxfp4-n-odd",
        "past-the-end",
        "n-odd",
        "group-64-zeros-bias",
        "group-32-zeros-odd-blocks",
        "per-channel-zeros-odd-blocks",
    )
    PAIRS = [(n, c) for n in CONFIGS for c in CASES if n == "pointer" or c.name in FEW]

    @pytest.mark.parametrize("name, case", PAIRS, ids=str)
    def test_case(name, case):
        config, operands = CONFIGS[name], make(case)
        problem = problem_of(case, operands)
        assert BACKEND.supports(problem, Device.current("cpu")) is None
        out = poisoned_out(case)
        assert BACKEND.run(problem, operands, config, out) is out
        check(case, out, operands, **({"limit": 2e-6} if case.out_dtype is not None else {}))

    @pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
    @pytest.mark.parametrize("group, dtype, zeros", [(64, BF16, True), (32, FP16, True), (None, BF16, False)])
    def test_one_hot_activations_decode_every_weight(config, group, dtype, zeros):
        w = Int4Weight.quantize(torch.randn(2, 40, 128).to(dtype), group, symmetric=not zeros)
        a, offs = torch.eye(128, dtype=dtype).repeat(2, 1), torch.tensor([128, 256], dtype=torch.int32)
        problem = triton_int4.WeightOnlyProblem.of(a, w, offs)
        got = BACKEND.run(problem, triton_int4.Operands(a, w, offs), config, None)
        assert torch.equal(got.view(2, 128, 40).transpose(1, 2), w.dequantize())

    @pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
    @pytest.mark.parametrize("dtype", [BF16, FP16])
    def test_one_hot_activations_decode_every_mxfp4_weight(config, dtype):
        k, low = 96, -93 if dtype is BF16 else -23
        scales = torch.arange(127 + low, 127 + (34 if dtype is BF16 else 2), dtype=torch.uint8)
        scales = scales.repeat(2 * 40 * 3 // len(scales) + 1)[: 2 * 40 * 3].view(2, 40, 3)
        codes = torch.arange(2 * 40 * k).view(2, 40, k).add(torch.arange(40)[:, None]).remainder(16)
        w = Mxfp4Weight.of_codes(codes.to(torch.uint8), scales)
        a, offs = torch.eye(k, dtype=dtype).repeat(2, 1), torch.tensor([k, 2 * k], dtype=torch.int32)
        problem = triton_int4.WeightOnlyProblem.of(a, w, offs)
        got = BACKEND.run(problem, triton_int4.Operands(a, w, offs), config, None)
        assert torch.equal(got.view(2, k, 40).transpose(1, 2), w.dequantize(dtype))

    @pytest.mark.parametrize("k", [256, 160, 96, 32])
    @pytest.mark.parametrize("activations", ["16 bits", "FP8"])
    def test_dequantize_mxfp4_bit_for_bit(k, activations):
        blocks = torch.randint(0, 256, (2, 70, k // 32, 16), dtype=torch.uint8)
        w = Mxfp4Weight.from_blocks(blocks, torch.randint(0, 255, blocks.shape[:3], dtype=torch.uint8))
        w = Mxfp4Fp8Weight.of(w) if activations == "FP8" else w
        for dtype in (torch.bfloat16, torch.float32):
            want = w.dequantize(dtype)
            assert torch.equal(dequantize_on_gpu(w, dtype), want)
            for first, last in ((0, 128), (128, None)) if k > 128 else ():
                assert torch.equal(dequantize_on_gpu(w, dtype, first, last), want[..., first:last])

    @pytest.mark.parametrize("k, group, zeros", [(256, 128, False), (192, 32, True), (192, 192, True)])
    def test_dequantize_bit_for_bit(k, group, zeros):
        w = Int4Weight.quantize(torch.randn(2, 70, k), group, symmetric=not zeros)
        for dtype in (torch.bfloat16, torch.float32):
            assert torch.equal(dequantize_on_gpu(w, dtype), w.dequantize(dtype))
            assert torch.equal(dequantize_on_gpu(w, dtype, 128), w.dequantize(dtype)[..., 128:])
