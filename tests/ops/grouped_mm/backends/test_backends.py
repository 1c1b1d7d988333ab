from dataclasses import replace

import pytest

from expertile.device import Device, known_devices
from expertile.ops.grouped_mm.backends import BACKENDS, by_name
from expertile.ops.grouped_mm.problem import Layout, Problem
from tests.ops.grouped_mm.cases import CASES, Case, make


def test_order_and_names():
    names = [b.name for b in BACKENDS]
    assert names[:5] == ["loop", "padded_bmm", "torch_grouped", "cublas_grouped", "quack"]
    assert names[5:7] in (["triton_pointer", "triton_tma"], [])
    assert len(set(names)) == len(names)


def test_by_name():
    for backend in BACKENDS:
        assert by_name(backend.name) is backend
    with pytest.raises(ValueError, match=r"backend: expected one of loop, padded_bmm, .*got 'cutlass'"):
        by_name("cutlass")


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_every_backend_answers_for_every_case_and_device(backend):
    """`supports` gives a reason in words or None, never raises, and what it accepts has a config."""
    for case in CASES:
        a, b, offs, bias = make(case)
        known = Problem.from_tensors(a, b, offs, bias, case.out_dtype)
        for problem in (known, known.with_sizes(None)):
            for device in (*known_devices(), Device.current("cpu")):
                reason = backend.supports(problem, device)
                assert reason is None or (isinstance(reason, str) and len(reason) > 5)
                if reason is None:
                    assert backend.configs(problem, device)


@pytest.mark.parametrize(
    "name, layout, a_storage, b_storage, refused",
    [
        ("gluon_hopper", Layout.RAGGED_M, "column", "row", True),
        ("gluon_hopper", Layout.BATCHED, "column", "row", False),
        # Its first tiles start a little ahead of the group.
        ("triton_tma", Layout.RAGGED_M, "column", "column", False),
        ("triton_tma", Layout.RAGGED_N, "row", "row", False),
    ],
)
def test_tma_does_not_start_inside_16_bytes(name, layout, a_storage, b_storage, refused):
    """Where groups begin along the contiguous dimension, a block may start anywhere: illegal for TMA."""
    if name not in {b.name for b in BACKENDS}:
        pytest.skip(f"{name} needs Triton")
    sizes = (0, 0) if layout is Layout.BATCHED else (130, 64, 0, 130, 33)
    case = Case("starts", layout, sizes, m=64, n=256, k=528, past=27, a_storage=a_storage, b_storage=b_storage)
    a, b, offs, bias = make(case)
    problem = replace(Problem.from_tensors(a, b, offs, bias, None), device_type="cuda")
    reason = by_name(name).supports(problem, Device.by_name("h200"))
    assert (reason is not None and "must not be the contiguous dimension" in reason) == refused
