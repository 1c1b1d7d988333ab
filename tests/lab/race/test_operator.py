"""Workloads of operators: what they hold, and what they refuse."""

import pytest
import torch

from tests.lab.operators.toy import workload


def test_a_workload_knows_its_dims():
    w = workload(8, 16, "bf16")
    assert (w["rows"], w["cols"]) == (8, 16) and w.torch_dtype is torch.bfloat16
    assert w.shape() == {"rows": 8, "cols": 16} and list(w.shape()) == ["rows", "cols"]
    with pytest.raises(KeyError):
        w["depth"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "int8"}, "dtype: expected one of fp32, bf16, fp16, fp8, got 'int8'"),
        ({"name": ""}, "name: expected a non-empty string"),
        ({"op": ""}, "op: expected a non-empty string"),
    ],
)
def test_mistakes_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        workload(**fields)


def test_dims_have_names_of_their_own():
    from dataclasses import replace

    with pytest.raises(ValueError, match="dims: expected each name once, got 'rows' twice"):
        replace(workload(), dims=(("rows", 1), ("rows", 2)))
