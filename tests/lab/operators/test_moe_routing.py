"""What stands between the products of an MoE layer: right, found when wrong, rounding only where there are tiles."""

from dataclasses import replace

import pytest
import torch

from expertile.lab.operators import for_cpu, moe_routing
from expertile.lab.race.gate import judge

CPU = torch.device("cpu")
OPERATORS = {operator.name: operator for operator in moe_routing.OPERATORS}
SMALL = [w for w in for_cpu(moe_routing.workloads()) if w["tokens"] == 600]


def verdict(w, rival, seed=0):
    operator = OPERATORS[w.op]
    inputs = operator.make_inputs(w, CPU, seed)
    return judge(rival, w, inputs, (rival.reference or operator.reference)(w, inputs), operator.tolerance(w))


def test_every_kernel_is_there_and_rounding_needs_tiles():
    assert [w.op for w in SMALL] == [*OPERATORS, "moe_round"] and [w["mode"] for w in SMALL[-2:]] == [
        "nearest",
        "adaptive",
    ]
    rounded = {(w["tokens"], w["experts"]) for w in moe_routing.workloads() if w.op == "moe_round"}
    assert rounded == {(32768, 128), (24576, 128), (32768, 256), (32768, 64), (600, 8)}
    assert moe_routing.SHAPES[0] == (32768, 128, 8) and len(set(moe_routing.SHAPES)) == len(moe_routing.SHAPES)


@pytest.mark.parametrize("w", SMALL, ids=lambda w: w.name)
def test_all_are_right_and_a_wrong_one_is_not(w):
    for rival in OPERATORS[w.op].rivals:
        assert verdict(w, rival).ok, rival.name

        def wrong(w, inputs, bind=rival.bind):
            call = bind(w, inputs)

            def spoiled():
                first, *others = call()
                return (first.index_add(0, torch.tensor([0]), torch.ones_like(first[:1])), *others)

            return spoiled

        assert not verdict(w, replace(rival, bind=wrong)).ok, rival.name


def test_a_token_has_one_right_choice():
    (logits,) = OPERATORS["moe_route"].make_inputs(moe_routing.workload("moe_route", 50, 256, 8), CPU, 1)
    assert all(row.unique().numel() == 256 for row in logits)


def test_rounding_leaves_whole_tiles():
    w = SMALL[-2]
    (rounded,) = OPERATORS[w.op].rivals[0].bind(w, OPERATORS[w.op].make_inputs(w, CPU, 0))()
    assert not (rounded[rounded < 8].bincount() % moe_routing.TILE).any()


def test_work_counts_each_input_and_output_once():
    """16-bit logits, ids and weights of 4 bytes."""
    t, e, k = 600, 8, 2
    expected = {
        "moe_permutation": 4 * t * k + (4 * e + 3 * 4 * t * k),  # ids; offs, rows, slots, positions
        "moe_route": 2 * t * e + 8 * t * k,
        "moe_route_scores": 2 * t * e + 8 * t * k + 4 * t * e,
        "moe_route_backward": (2 + 4 + 4) * t * k + 2 * t * e,  # the chosen logits, ids, dweights; the gradient
        "moe_round": 8 * t * (k + 1) + 4 * t * (k + 1),
    }
    assert {w.op: OPERATORS[w.op].work(w).nbytes for w in SMALL} == expected
