"""Memory cases of operators: who is measured, and on what."""

import torch

from expertile.device import Device
from expertile.lab.operators.memory import memory_cases
from expertile.lab.race.case import Site
from expertile.lab.race.memory import measure_memory
from tests.lab.operators.toy import operator, right, rival, workload

CPU = torch.device("cpu")
SITE = Site(Device.current("cpu"), CPU)
AS_ON_A_GPU = Site(Device.by_name("h200"), CPU)


def test_every_rival_that_can_is_a_case_with_its_formula():
    def out_nbytes(w):
        return w["rows"] * (w["cols"] + 1) * 4

    ours = rival("expertile", right, peak_nbytes=out_nbytes)
    picky = rival("picky", right, supports=lambda w, device: "no")
    toy = operator(ours, rival("torch", lambda x: ((x + 0) * 2, right(x)[1])), picky)
    listed = workload(unsupported="not on a Sunday")
    found = list(measure_memory(memory_cases([workload(64, 64), listed], {"double": toy}, AS_ON_A_GPU), "cpu"))
    assert [(r.backend, r.workload, r.shape["rows"]) for r in found] == [
        ("expertile", "toy/64x64-fp32", 64),
        ("torch", "toy/64x64-fp32", 64),
    ]
    formula = out_nbytes(workload(64, 64))
    assert found[0].formula_nbytes == formula and formula <= found[0].peak_nbytes < 1.2 * formula
    assert found[1].formula_nbytes is None and found[1].peak_nbytes >= 2 * 64 * 64 * 4
    assert [case.formula_nbytes for case in memory_cases([workload()], {"double": toy}, SITE)] == [None, None]


def test_what_bind_allocates_does_not_count():
    def bind(w, inputs):
        kept = torch.empty(1 << 20)
        return lambda: (kept, inputs[0] + 1)[1:]

    (found,) = measure_memory(
        memory_cases([workload()], {"double": operator(rival("a", right, bind=bind))}, SITE), "cpu"
    )
    assert 24 * 40 * 4 <= found.peak_nbytes < 1 << 16
