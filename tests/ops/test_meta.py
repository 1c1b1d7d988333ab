"""Tensors on the meta device: shapes, dtypes and errors without values."""

from functools import partial

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import expertile as xt

META = partial(torch.empty, device="meta")
FP8 = partial(META, dtype=torch.float8_e4m3fn)
ENDS = META(3, dtype=torch.int32)
ONES = xt.Mxfp4Weight.quantize(torch.ones(3, 5, 64))
W, W8 = ONES.to("meta"), xt.Mxfp4Fp8Weight.of(ONES).to("meta")


def test_meta_tensors_give_shapes_dtypes_and_errors():
    a, b, offs = torch.empty(12, 5, device="meta"), torch.empty(3, 5, 4, device="meta"), ENDS
    out = xt.grouped_mm(a.requires_grad_(), b, offs=offs, out_dtype=torch.bfloat16)
    assert (out.shape, out.dtype, out.device.type) == ((12, 4), torch.bfloat16, "meta")
    out.sum().backward()
    assert a.grad.shape == a.shape
    assert xt.grouped_mm(b, a.new_empty(3, 4, 6)[:, :, :2]).shape == (3, 5, 2)
    with pytest.raises(ValueError, match="b: expected 5 rows"):
        xt.grouped_mm(a, b.transpose(1, 2), offs=offs)
    with torch.device("meta"):
        layer = xt.MoE(hidden_size=6, intermediate_size=4, num_experts=5, top_k=2)
    y = layer(torch.empty(2, 3, 6, device="meta"))
    y.sum().backward()
    assert y.shape == (2, 3, 6) and layer.gate_up.grad.shape == layer.gate_up.shape
    for operator in (xt.softmax, xt.layer_norm, xt.rms_norm, xt.laplacian, lambda x: xt.add_scalar(x, 1.0)):
        assert operator(a).shape == a.shape and operator(a).is_meta


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: xt.attention(META(1, 2, 3, 8), META(1, 2, 5, 8), META(1, 2, 4, 8)), "v: expected shape"),
        (lambda: xt.attention(*(META(1, 2, 3, 8, dtype=torch.int64),) * 3), "q: expected a dtype"),
        (
            lambda: xt.scaled_grouped_mm(FP8(10, 256), FP8(3, 100, 5), META(1), META(1), offs=ENDS),
            "b: expected 256 rows",
        ),
        (lambda: xt.grouped_mm(META(10, 100), W, offs=META(7, dtype=torch.int32)), "a: expected dtype torch.bfloat16"),
        (lambda: xt.grouped_mm(META(10, 64).bfloat16(), W, offs=META(7, dtype=torch.int32)), "offs: expected length 3"),
        (lambda: xt.scaled_grouped_mm(FP8(10, 64), W8, META(9), offs=ENDS), r"scale_a: expected \[10, 1\]"),
    ],
)
def test_meta_tensors_that_do_not_fit_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_meta_tensors_may_be_traced(mode):
    """What looks on has no address of them, and sizes that are no numbers."""

    def calls(a, b, offs, q, a8, b8, s, t):
        return (
            xt.grouped_mm(a, b, offs=offs),
            xt.grouped_mm(a, W, offs=offs),
            xt.attention(q, q, q),
            xt.scaled_grouped_mm(a8, b8, s, t, offs=offs),
            xt.scaled_grouped_mm(a8, W8, s, offs=offs),
        )

    half = partial(META, dtype=torch.bfloat16)
    operands = (half(10, 64), half(3, 64, 5), ENDS, half(1, 2, 3, 8), FP8(10, 64), FP8(3, 64, 5), META(10), META(3, 5))
    shapes = [x.shape for x in calls(*operands)]
    graph = make_fx(calls, tracing_mode=mode, _allow_non_fake_inputs=True)(*operands)
    compiled = torch.compile(calls, backend="eager", fullgraph=True, dynamic=mode == "symbolic")
    for made in (graph, compiled):
        assert [x.shape for x in made(*operands)] == shapes
