"""The families of operators: joined by name, complete, and reasonable to ask of a CPU."""

import re
from pathlib import Path

import pytest
import torch

from expertile.lab import operators as families
from expertile.lab.operators import diagnose, for_cpu, moe_routing, operators, presets
from expertile.lab.race.workloads import ragged_m


def test_every_file_that_exports_operators_is_a_family():
    folder = Path(families.__file__).parent
    files = {p.stem for p in folder.glob("*.py") if re.search(r"^OPERATORS\b", p.read_text(), re.M)}
    known = {f"expertile.lab.operators.{name}" for name in files}
    assert {module.__name__ for module in families._families()} == known and len(known) >= 12
    assert all(module.PRESETS for module in families._families())


@pytest.mark.parametrize("name", presets())
def test_workloads_name_their_preset_and_a_known_operator_once(name):
    workloads = presets()[name]()
    assert workloads and workloads == presets()[name]()
    assert {w.preset for w in workloads} == {name}
    assert {w.op for w in workloads} <= set(operators())
    assert len({(w.op, w.name) for w in workloads}) == len(workloads)
    assert len({(w.op, w.dims, w.dtype) for w in workloads}) == len(workloads)


@pytest.mark.parametrize("name", presets())
def test_a_cpu_has_something_to_measure(name):
    workloads = presets()[name]()
    left = for_cpu(workloads)
    assert left and (set(left) < set(workloads) or name == "moe-routing")  # whose every kernel a CPU runs in a moment
    assert {w.op for w in left} == {w.op for w in workloads}


DIAGNOSED = tuple(operator.name for operator in diagnose.OPERATORS)  # torch alone: what a machine does


@pytest.mark.parametrize("op", operators())
def test_rivals_have_names_of_their_own_and_ours_is_among_them(op):
    names = [rival.name for rival in operators()[op].rivals]
    assert len(set(names)) == len(names) and not {"dense", "copy"} & set(names)
    assert {baseline.name for baseline in operators()[op].baselines} <= {"dense"}
    ours = [rival for rival in operators()[op].rivals if not rival.peer]
    assert (ours or op in DIAGNOSED) and all(rival.name.split("-")[0] == "expertile" for rival in ours)


def _smallest(op):
    mine = [w for build in presets().values() for w in build() if w.op == op]
    return min(mine, key=lambda w: operators()[op].work(w).nbytes)


PARTS = ("moe_stage", *(operator.name for operator in moe_routing.OPERATORS))


@pytest.mark.parametrize("op", operators())
def test_inputs_follow_the_seed_and_work_counts_them(op):
    operator, w = operators()[op], _smallest(op)
    first, again, other = (operator.make_inputs(w, torch.device("cpu"), seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    outputs = operator.reference(w, first)
    assert all(x.dtype in (torch.float32, torch.float64) for x in outputs)
    read = sum(x.numel() * x.element_size() for x in first)
    written = sum(x.numel() for x in outputs) * w.torch_dtype.itemsize
    if op in (*PARTS, "diagnose_split"):
        return  # they read some of their inputs, and write integers
    # Statistics may be float32 beside bfloat16 results, and a backward pass may read what its forward pass kept.
    # Quantised results are half as wide as their inputs or less.
    least = 0.7 if op == "quantize_fp8" else 0.9
    assert least * (read + written) <= operator.work(w).nbytes <= 1.6 * (read + written)


def test_grouped_products_are_left_alone():
    product = ragged_m("large", "t", (1 << 20,), 4096, 4096, "bf16")
    assert for_cpu([product]) == (product,)


def test_a_cpu_is_spared_by_bytes_and_by_flops(monkeypatch):
    w = _smallest(next(iter(operators())))
    assert for_cpu([w]) == (w,)
    for limit in ("CPU_NBYTES", "CPU_FLOPS"):
        with monkeypatch.context() as patch:
            patch.setattr(f"expertile.lab.operators.{limit}", 0.5)
            assert for_cpu([w]) == ()
