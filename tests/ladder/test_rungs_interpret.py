"""Every Triton rung of the ladder over the shared case table, on the CPU through Triton's interpreter."""

import pytest

from tests.support import interpreter

if not interpreter.active():

    def test_under_the_interpreter():
        interpreter.run_file_interpreted(__file__)

else:
    from dataclasses import replace

    import torch

    from expertile.device import Device
    from expertile.ladder import RUNGS
    from expertile.ops.grouped_mm.backend import Operands
    from expertile.ops.grouped_mm.problem import Layout, Problem
    from tests.ops.grouped_mm.cases import CASES, Case, check, expected, make, poisoned_out

    interpreter.repair()

    CPU = Device.current("cpu")
    TRITON_RUNGS = RUNGS[2:7]  # the interpreter runs no Gluon; that rung is the backend gluon_hopper, tested there
    ROWS = [
        case
        for case in CASES
        if case.layout is Layout.RAGGED_M and case.dtype.itemsize == 2 and case.out_dtype is None and not case.bias
    ]
    # What every Triton rung is for. The table's other rows run on those rungs whose `supports` accepts them.
    COMMON = (
        "m-plain",
        "m-empty-groups",
        "m-all-rows-in-one-group",
        "m-rows-past-the-end",
        "m-many-groups",
        "m-fp16",
        "m-one-group",
        "m-ragged-tiles-of-k",
        "m-k-smaller-than-a-block",
        "m-padded-rows",
        "m-all-groups-empty",
    )
    CASES_TO_RUN = [*ROWS, Case("m-padded-rows", Layout.RAGGED_M, (30, 20), n=48, k=64, a_storage="padded")]

    def problem_of(case: Case, operands: tuple) -> Problem:
        a, b, offs, bias = operands
        return Problem.from_tensors(a, b, offs, bias, case.out_dtype)

    def small(rung, problem):
        """The rung's own config with tiles that make several of a small problem."""
        return replace(rung.configs(problem, CPU)[0], block_m=32, block_n=16, block_k=32)

    # What is common on every rung; of the rest each rung takes every other case in turn.
    @pytest.mark.parametrize(
        "rung, case",
        [
            (rung, case)
            for i, rung in enumerate(TRITON_RUNGS)
            for j, case in enumerate(CASES_TO_RUN)
            if case.name in COMMON[:4] or (i + j) % 2 == 0
        ],
        ids=str,
    )
    def test_case(rung, case):
        operands = make(case)
        problem = problem_of(case, operands)
        reason = rung.supports(problem, CPU)
        if reason is not None:
            assert case.name not in COMMON, reason
            pytest.skip(reason)
        out = poisoned_out(case)
        result = rung.run(problem, Operands(*operands), small(rung, problem), out)
        assert result is out
        check(case, out, expected(case, *operands))

    @pytest.mark.parametrize("name", ["m-odd-sizes", "m-odd-n-aligned-k", "m-k-is-one", "m-misaligned-base"])
    def test_the_masked_rung_takes_what_the_hints_exclude(name):
        case = next(c for c in CASES if c.name == name)
        problem = problem_of(case, make(replace(case, b_storage="column")))
        reasons = [rung.supports(problem, CPU) for rung in TRITON_RUNGS]
        assert reasons[0] is None and "16-byte" in reasons[1] and "16-byte" in reasons[2]

    @pytest.mark.parametrize("group_m", [2, 3])
    def test_every_panel_covers_every_tile(group_m):
        case = Case("raster", Layout.RAGGED_M, (150, 10, 75), n=80, k=32)
        operands = make(case)
        problem, out = problem_of(case, operands), poisoned_out(case)
        rung = RUNGS[6]
        rung.run(problem, Operands(*operands), replace(small(rung, problem), group_m=group_m), out)
        check(case, out, expected(case, *operands))

    def test_a_result_that_cannot_be_stored_is_refused():
        case = Case("strided", Layout.RAGGED_M, (20,), n=24, k=32)
        operands = make(case)
        problem, out = problem_of(case, operands), torch.empty(20, 48, dtype=case.dtype)[:, ::2]
        for rung in TRITON_RUNGS[:3]:
            with pytest.raises(ValueError, match="out: expected contiguous rows"):
                rung.run(problem, Operands(*operands), small(rung, problem), out)
