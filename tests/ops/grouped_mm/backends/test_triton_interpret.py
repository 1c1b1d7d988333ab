"""Every Triton backend over the shared case table, on the CPU through Triton's interpreter."""

import pytest

from tests.support import interpreter

if not interpreter.active():

    def test_under_the_interpreter():
        interpreter.run_file_interpreted(__file__)

else:
    from dataclasses import replace

    import torch

    from expertile.device import Device
    from expertile.ops.grouped_mm.backend import Operands
    from expertile.ops.grouped_mm.backends import triton_pointer, triton_tma
    from expertile.ops.grouped_mm.problem import Layout, Problem
    from expertile.ops.grouped_mm.tail import zero_tail
    from tests.ops.grouped_mm.cases import CASES, Case, check, expected, make, poisoned_out

    interpreter.repair()

    POINTER = triton_pointer.Config(32, 16, 32, 4, 2, group_m=2)
    TMA = triton_tma.Config(32, 16, 32, 4, 2, group_m=2)
    TMA_SUBTILED = replace(TMA, block_n=32, subtile=2, flatten=True)
    TRITON_TO_RUN = ((triton_pointer.BACKEND, POINTER), (triton_tma.BACKEND, TMA), (triton_tma.BACKEND, TMA_SUBTILED))

    def problem_of(case: Case, operands: tuple) -> Problem:
        a, b, offs, bias = operands
        return Problem.from_tensors(a, b, offs, bias, case.out_dtype)

    @pytest.mark.parametrize("case", CASES, ids=str)
    @pytest.mark.parametrize("backend, config", TRITON_TO_RUN, ids=["pointer", "tma", "tma-subtiled"])
    def test_case(case, backend, config):
        operands = make(case)
        problem = problem_of(case, operands)
        reason = backend.supports(problem, Device.current("cpu"))
        if reason is not None:
            pytest.skip(reason)
        out = poisoned_out(case)
        result = backend.run(problem, Operands(*operands), config, out)
        assert result is out
        check(case, out, expected(case, *operands))

    @pytest.mark.parametrize("backend, config", TRITON_TO_RUN[:2], ids=["pointer", "tma"])
    @pytest.mark.parametrize("layout", list(Layout), ids=str)
    def test_writes_into_a_strided_output(backend, config, layout):
        a_storage, b_storage = ("column", "row") if layout is Layout.RAGGED_K else ("row", "column")
        case = Case("strided", layout, (20, 0, 30), m=40, n=24, k=32, a_storage=a_storage, b_storage=b_storage)
        operands = make(case)
        wide = torch.full((*case.shapes[2][:-1], 2 * case.shapes[2][-1]), float("nan"), dtype=case.dtype)
        out = wide[..., ::2]
        backend.run(problem_of(case, operands), Operands(*operands), config, out)
        check(case, out, expected(case, *operands))
        assert wide[..., 1::2].isnan().all()

    @pytest.mark.parametrize("backend, config", TRITON_TO_RUN[:2], ids=["pointer", "tma"])
    def test_allocates_an_output(backend, config):
        case = Case("allocated", Layout.RAGGED_M, (20, 30), n=24, k=32, out_dtype=torch.float32)
        operands = make(case)
        out = backend.run(problem_of(case, operands), Operands(*operands), config, None)
        check(case, out, expected(case, *operands))

    @pytest.mark.parametrize("group_m", [1, 2, 3, 8])
    def test_every_raster_covers_every_tile(group_m):
        case = Case("raster", Layout.RAGGED_M, (150, 10, 75), n=80, k=16)
        operands = make(case)
        out = poisoned_out(case)
        config = replace(POINTER, group_m=group_m)
        triton_pointer.BACKEND.run(problem_of(case, operands), Operands(*operands), config, out)
        check(case, out, expected(case, *operands))

    def test_tma_takes_the_common_cases():
        """A skip in the table must not hide that the descriptors' kernel refuses what it is for."""
        device = Device.current("cpu")
        for name in ("m-plain", "m-weights-kn", "m-bias", "k-wgrad", "n-plain", "b-plain", "b-weights-kn"):
            case = next(c for c in CASES if c.name == name)
            assert triton_tma.BACKEND.supports(problem_of(case, make(case)), device) is None

    @pytest.mark.parametrize(
        "shape, dim, ends",
        [((300, 130), 0, [10, 150]), ((130, 300), 1, [10, 150, 150]), ((5, 3), 0, [0]), ((0, 3), 0, [0])],
    )
    @pytest.mark.parametrize("by_columns", [False, True])
    def test_what_lies_past_the_last_group_becomes_zero(shape, dim, ends, by_columns):
        x = torch.full(shape, float("nan"))
        x.narrow(dim, 0, ends[-1]).fill_(1.0)
        x = x.t().contiguous().t() if by_columns else x
        with torch.no_grad():
            found = zero_tail(x, torch.tensor(ends, dtype=torch.int32), dim)
        assert found is x and x.sum() == ends[-1] * shape[1 - dim] and not x.isnan().any()
