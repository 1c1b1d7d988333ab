"""Workloads of one's own have the dimensions that the operator's presets have."""

import pytest
import torch

from expertile.lab.bench.config import custom
from expertile.lab.operators import operators, presets


@pytest.mark.parametrize("op", operators())
def test_every_workload_of_a_preset_can_be_given_by_hand(op):
    example = next(w for build in presets().values() for w in build() if w.op == op)
    backwards = dict(reversed(example.dims))
    own = custom("mine", op, backwards, example.dtype)
    assert (own.dims, own.op, own.preset, own.name) == (example.dims, op, "file", "mine")


def test_a_given_workload_is_computed():
    w = custom("mine", "softmax", {"rows": 3, "cols": 7}, "fp32")
    inputs = operators()["softmax"].make_inputs(w, torch.device("cpu"), 0)
    assert [tuple(x.shape) for x in inputs] == [(3, 7)]


@pytest.mark.parametrize(
    ("op", "dims", "message"),
    [
        ("soft", {}, "op: expected one of add_scalar, .*, got 'soft'"),
        ("softmax", {"rows": 3}, r"dims\.cols: expected rows \(an integer\), cols \(an integer\) for softmax, got no"),
        ("softmax", {"rows": 3, "columns": 4}, r"dims\.columns: expected rows .* got 'columns'"),
        ("softmax", {"rows": 3, "cols": 4.0}, r"dims\.cols: expected an integer, got 4\.0"),
        ("softmax", {"rows": True, "cols": 4}, r"dims\.rows: expected an integer, got True"),
        ("softmax", {"rows": -3, "cols": 4}, r"dims\.rows: expected 0 or more, got -3"),
        ("add_scalar", {"elements": 3, "value": 1}, r"dims\.value: expected a number, got 1"),
    ],
)
def test_mistakes_are_named(op, dims, message):
    with pytest.raises(ValueError, match=message):
        custom("mine", op, dims, "fp32")
