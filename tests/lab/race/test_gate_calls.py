"""The gate of operators: whoever computes something else, or only once, or into its inputs, is told why."""

import math

import pytest
import torch

from expertile.lab.race.gate import compare, judge
from tests.lab.operators.toy import make_inputs, raises, reference, right, rival, workload

CPU = torch.device("cpu")
W = workload()


def verdict(one, tolerance=(1e-6, 1e-6), w=W):
    inputs = make_inputs(w, CPU, 3)
    return judge(one, w, inputs, reference(w, inputs), tolerance)


def test_a_right_rival_passes_with_its_errors():
    found = verdict(rival("right", right))
    assert found.ok and found.reason == "" and 0 < found.rel_error < 1e-6 and 0 < found.max_error < 1e-6


def spoilt(x):
    out = 2 * x
    out[5, 7] += 1.0
    return out, out.sum(1)


def unwritten(x):
    out = 2 * x
    out[5, 7] = math.nan
    return out, right(x)[1]


@pytest.mark.parametrize(
    ("compute", "says"),
    [
        (spoilt, "output 0: relative error"),
        (unwritten, "output 0: 1 of 960 elements are NaN, infinite or were never written"),
        (lambda x: (2 * x, 3 * x.sum(1)), "output 1: relative error"),
        (lambda x: (2 * x,), "result: expected 2 tensors, got 1"),
        (lambda x: 2 * x, "result: expected a tuple of tensors, got Tensor"),
        (lambda x: (2 * x.t(), x.sum(1)), r"output 0: expected shape [24, 40], got [40, 24]"),
        (lambda x: (2 * x.mul_(1.0001), 2 * x.sum(1)), "error"),
    ],
)
def test_a_wrong_rival_is_told_why(compute, says):
    found = verdict(rival("wrong", compute))
    assert not found.ok and says in found.reason


def test_one_wrong_element_among_many_shows_in_the_largest_error():
    w = workload(512, 512)

    def nearly(x):
        out = 2 * x
        out[100, 200] += 0.5
        return out, right(x)[1]

    found = verdict(rival("nearly", nearly), (1e-2, 1e-2), w)
    assert not found.ok and "largest error of an element" in found.reason and found.rel_error < 1e-2


def test_results_that_pile_up_over_calls_are_wrong():
    def bind(w, inputs):
        total = torch.zeros_like(inputs[0])

        def call():
            total.add_(inputs[0], alpha=2.0)
            return total, right(inputs[0])[1]

        return call

    found = verdict(rival("piles", right, bind=bind))
    assert not found.ok and found.reason.startswith("called again: output 0: relative error 1.00")


def test_changing_the_inputs_is_wrong():
    def greedy(x):
        out = right(x)
        x.zero_()
        return out

    # The second call finds zeros, and its reference is that of the first.
    assert "called again" in verdict(rival("greedy", greedy)).reason

    def late(w, inputs):
        calls = []

        def call():
            calls.append(1)
            out = right(inputs[0])
            if len(calls) == 2:
                inputs[0].zero_()
            return out

        return call

    assert verdict(rival("late", right, bind=late)).reason == "changes its inputs"


def test_integer_inputs_are_watched_too():
    lengths = torch.tensor([0, 3, 7], dtype=torch.int32)

    def bind(w, inputs):
        def call():
            inputs[1].add_(1)
            return right(inputs[0])

        return call

    inputs = (*make_inputs(W, CPU, 1), lengths)
    found = judge(rival("ints", right, bind=bind), W, inputs, reference(W, inputs), (1e-6, 1e-6))
    assert found.reason == "changes its inputs"


def test_bind_has_gradients_and_the_call_has_none():
    seen = []

    def bind(w, inputs):
        seen.append(torch.is_grad_enabled())

        def call():
            seen.append(torch.is_grad_enabled())
            return right(inputs[0])

        return call

    with torch.no_grad():
        assert verdict(rival("asks", right, bind=bind)).ok
    assert seen == [True, False, False]


def test_exceptions_pass_through():
    with pytest.raises(RuntimeError, match="tile out of range"):
        verdict(rival("broken", raises))


def test_where_all_must_be_zero_nothing_else_is_right():
    zero = (torch.zeros(4, 4, dtype=torch.float64),)
    assert compare((torch.zeros(4, 4),), zero, (1e-3, 1e-3)).ok
    found = compare((torch.full((4, 4), 1e-30),), zero, (1e-3, 1e-3))
    assert not found.ok and found.rel_error == math.inf


def test_an_empty_result_is_right():
    assert compare((torch.zeros(0, 4),), (torch.zeros(0, 4, dtype=torch.float64),), (0.0, 0.0)).ok
