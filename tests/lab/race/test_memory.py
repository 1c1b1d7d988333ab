"""Peak memory: counted where it is known, stored and read back, failures told, formulas beside it."""

import pytest
import torch

from expertile.device import Device
from expertile.lab.race.case import Site
from expertile.lab.race.memory import FORMULA, measure_memory, peak_memory
from expertile.lab.race.record import kept, read
from tests.lab.operators.toy import operator, right, rival, workload

CPU = torch.device("cpu")
MB = 1 << 20
SITE = Site(Device.current("cpu"), CPU)
AS_ON_A_GPU = Site(Device.by_name("h200"), CPU)


@pytest.mark.parametrize(
    ("fn", "peak"),
    [
        (lambda x: x + 1, 4 * MB),
        (lambda x: (x + 1) + 1, 8 * MB),  # the first sum lives until the second is there
        (lambda x: ((x + 1).sum(), x * 2)[1], 4 * MB),  # it is gone before the product
        (lambda x: x.add_(1), 0),
    ],
)
def test_the_peak_counts_what_lives_at_the_same_time(fn, peak):
    x = torch.zeros(MB)
    assert peak <= peak_memory(lambda: fn(x), CPU) <= peak + 4096


def test_the_profiler_is_not_heard(capfd):
    peak_memory(lambda: torch.zeros(8), CPU)
    assert capfd.readouterr() == ("", "")


def out_nbytes(w):
    return w["rows"] * (w["cols"] + 1) * 4


def measured(*rivals, site=SITE, path=None, workloads=None):
    return list(kept(measure_memory(workloads or [workload(64, 64)], {"double": operator(*rivals)}, site), path))


def test_every_rival_that_can_is_a_record_with_its_formula(tmp_path):
    path = tmp_path / "2026-11-21-toy-memory.jsonl"
    ours = rival("expertile", right, peak_nbytes=out_nbytes)
    picky = rival("picky", right, supports=lambda w, device: "no")
    twice = rival("torch", lambda x: ((x + 0) * 2, right(x)[1]))
    listed = workload(unsupported="not on a Sunday")
    found = measured(ours, twice, picky, site=AS_ON_A_GPU, path=path, workloads=[workload(64, 64), listed])
    assert [(r.backend, r.workload, r.shape["rows"], r.metric) for r in found] == [
        ("expertile", "toy/64x64-fp32", 64, "peak_bytes"),
        ("torch", "toy/64x64-fp32", 64, "peak_bytes"),
    ]
    formula = out_nbytes(workload(64, 64))
    assert found[0].details[FORMULA] == formula and formula <= found[0].value < 1.2 * formula
    assert not found[1].details and found[1].value >= 2 * 64 * 64 * 4
    assert read(path) == found and found[0].run == found[1].run and found[0].env.torch == torch.__version__
    assert not measured(ours)[0].details, "formulas are those of the GPU's kernels"


def test_the_first_call_and_what_bind_allocates_do_not_count():
    calls = []

    def bind(w, inputs):
        kept = torch.empty(1 << 20)
        return lambda: calls.append(1) or (kept, inputs[0] + 1)[1:]

    (found,) = measured(rival("a", right, bind=bind))
    assert len(calls) == 2 and 64 * 64 * 4 <= found.value < 1 << 16


def test_one_that_fails_is_a_record_with_the_reason():
    def too_much(x):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 TB")

    bad, good = measured(rival("greedy", too_much), rival("torch", right))
    assert bad.value is None and bad.status == "unsupported" and bad.reason.startswith("out of memory: ")
    assert good.status == "ok"
