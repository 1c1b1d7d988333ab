"""A training step of a grouped linear layer: what counts as right, and that a gradient's copy is part of it."""

import pytest
import torch

from expertile.lab.operators.grouped_mm_train import OPERATORS, PRESETS
from expertile.lab.race.gate import compare

(OPERATOR,) = OPERATORS
SMALL = next(w for w in PRESETS["grouped-train"]() if w.name == "small-gate-up")


@pytest.mark.parametrize("rival", OPERATOR.rivals, ids=lambda r: r.name)
def test_every_rival_makes_the_gradients(rival):
    inputs = OPERATOR.make_inputs(SMALL, torch.device("cpu"), 3)
    made, again = (rival.bind(SMALL, inputs)() for _ in range(2))
    assert compare(made, OPERATOR.reference(SMALL, inputs), OPERATOR.tolerance(SMALL)).ok
    assert all(map(torch.equal, made, again))


def test_a_gradient_of_another_order_is_wrong():
    inputs = OPERATOR.make_inputs(SMALL, torch.device("cpu"), 3)
    out, da, dweight = OPERATOR.rivals[0].bind(SMALL, inputs)()
    swapped = (out, da, dweight.flip(0))
    assert not compare(swapped, OPERATOR.reference(SMALL, inputs), OPERATOR.tolerance(SMALL)).ok


def test_each_call_makes_gradients_of_its_own():
    call = OPERATOR.rivals[0].bind(SMALL, OPERATOR.make_inputs(SMALL, torch.device("cpu"), 3))
    first, second = call(), call()
    assert all(a.data_ptr() != b.data_ptr() for a, b in zip(first, second, strict=True))


def test_work():
    m, n, k = 128, 64, 64
    assert OPERATOR.work(SMALL).flops == 6 * m * n * k
    assert OPERATOR.work(SMALL).nbytes == 2 * (2 * m * (n + k) + 2 * 4 * n * k)
