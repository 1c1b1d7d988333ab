"""triton_fp8 over the shared case table, on the CPU through Triton's interpreter."""

import pytest

from tests.support import interpreter

if not interpreter.active():

    def test_under_the_interpreter():
        interpreter.run_file_interpreted(__file__)

else:
    import torch

    from expertile.device import Device
    from expertile.ops.hopper import reduce
    from expertile.ops.scaled_grouped_mm.backends import triton_fp8
    from tests.ops.scaled_grouped_mm.cases import CASES, check, make, poisoned_out, problem_of

    interpreter.repair()

    CONFIGS = (triton_fp8.Config(32, 32, 128, 4, 2, group_m=2), triton_fp8.Config(64, 128, 64, 4, 2))

    @pytest.mark.parametrize("case", CASES, ids=str)
    @pytest.mark.parametrize("config", CONFIGS, ids=["narrow", "wide"])
    def test_case(case, config):
        operands = make(case)
        problem = problem_of(case, operands)
        assert triton_fp8.BACKEND.supports(problem, Device.current("cpu")) is None
        out = poisoned_out(case)
        assert triton_fp8.BACKEND.run(problem, operands, config, out) is out
        check(case, out, operands, limit=2e-6)

    @pytest.mark.parametrize("slices, n, used", [(2, 520, 5), (3, 1024, 6), (5, 4, 0)])
    def test_sum_of_slices(slices, n, used):
        partial = torch.randn(slices, 6, n)
        offs = torch.tensor([used // 2, used], dtype=torch.int32)
        wide = torch.full((6, n + 8), float("nan"), dtype=torch.bfloat16)
        out = wide[:, :n]
        reduce.run(partial, offs, out)
        total = partial[0]
        for s in range(1, slices):
            total = total + partial[s]
        assert torch.equal(out[:used], total[:used].bfloat16())
        assert out[used:].isnan().all() and wide[:, n:].isnan().all()
