"""The public calls, with weights that are no tensors."""

from dataclasses import replace

import pytest
import torch

import expertile as xt
from expertile.device import Device
from expertile.ops.grouped_mm.explain import explain_problem
from expertile.ops.weight_only_mm.api import choose
from expertile.ops.weight_only_mm.problem import WeightOnlyProblem

A = torch.randn(9, 128, dtype=torch.float16)
W = torch.randn(2, 16, 128)
OFFS = torch.tensor([4, 9], dtype=torch.int32)
INT4 = xt.Int4Weight.quantize(W.half(), 64)
MXFP4 = xt.Mxfp4Weight.quantize(W)


@pytest.mark.parametrize("w, name", [(INT4, "int4"), (MXFP4, "mxfp4")])
def test_a_product_with_four_bits_is_explained(w, name):
    explanation = xt.explain(A, w, offs=OFFS)
    assert f"2 groups, M=9 N=16 K=128, fp16 x {name} on" in str(explanation)
    assert explanation.choice.backend.name == "loop" and explanation.work.flops == 2 * 9 * 16 * 128
    assert explanation.work.nbytes == 2 * 9 * (128 + 16) + w.nbytes


def test_tiles_of_an_explanation_are_those_of_the_config():
    problem = replace(WeightOnlyProblem.of(A, MXFP4, OFFS), device_type="cuda")
    explanation = explain_problem(problem, Device.by_name("h200"), choose)
    config = explanation.choice.config
    assert explanation.choice.backend.name == "gluon_int4"
    assert (explanation.block_m, explanation.block_n) == (config.block_m, config.consumers * config.cols) != (128, 128)


NAMED = r"b \(w of weight_only_mm\): expected "
REFUSED = [
    ({"a": None}, "a: expected a torch.Tensor, got NoneType"),
    ({"b": None}, "b: expected a torch.Tensor, got NoneType"),
    ({"b": xt.Fp8Blocks.quantize(W)}, "b: expected a torch.Tensor, got Fp8Blocks"),
    ({"b": xt.Mxfp4Fp8Weight.of(MXFP4)}, NAMED + "one of int4, mxfp4 with 16-bit activations, got mxfp4_fp8"),
    ({"a": A[:, :64]}, NAMED + r"K = 64 \(a's last dimension\), got 128 in shape \[2, 16, 128\]"),
    ({"a": A.bfloat16()}, NAMED + "scales of dtype torch.bfloat16 as a has .*, got torch.float16"),
    ({"offs": None}, r"offs: expected an int32 tensor .* b \[2, 16, 128\]\), got None"),
    ({"offs": [4, 9]}, "offs: expected a torch.Tensor, got list"),
    ({"bias": torch.zeros(2, 3)}, r"bias: expected shape \[2, 16\]"),
]


@pytest.mark.parametrize("call", [xt.grouped_mm, xt.explain])
@pytest.mark.parametrize("changes, message", REFUSED)
def test_errors_name_the_argument(call, changes, message):
    arguments = {"a": A, "b": INT4, "offs": OFFS, **changes}
    with pytest.raises(ValueError, match=message):
        call(arguments.pop("a"), arguments.pop("b"), **arguments)
