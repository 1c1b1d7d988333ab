import pytest

from expertile.device import Device, known_devices
from expertile.ops.grouped_mm.backends import BACKENDS, by_name
from expertile.ops.grouped_mm.problem import Problem
from tests.ops.grouped_mm.cases import CASES, make


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
