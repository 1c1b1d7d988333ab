"""The way for few tokens, by the interpreter: values against the general way's and a loop over experts, and which
operands it takes."""

from tests.support import interpreter

if not interpreter.active():

    def test_under_the_interpreter():
        interpreter.run_file_interpreted(__file__)

else:
    import pytest
    import torch

    from expertile.moe import _few
    from expertile.moe.experts import moe_mlp
    from expertile.moe.layer import MoE
    from expertile.moe.router import route
    from tests.moe.test_experts import make, naive

    interpreter.repair()

    def error(found, expected):
        return float((found.double() - expected).norm() / expected.norm())

    def half(operands, dtype=torch.bfloat16):
        return {n: t if t is None or n == "topk_weights" else t.to(dtype) for n, t in operands.items()}

    def mlp(ids, o, activation="swiglu", interleaved=False):
        return _few.mlp(
            o["x"],
            o["gate_up"],
            o["down"],
            ids,
            o["topk_weights"],
            o["gate_up_bias"],
            o["down_bias"],
            activation,
            interleaved,
        )

    @pytest.fixture(params=["small tiles", "default"])
    def tiles(request, monkeypatch):
        if request.param == "small tiles":
            small = _few.Tiling(16, 32, 2, 4)
            monkeypatch.setattr(_few, "tilings", lambda tokens, inner: (small, small))

    # Multiples of a tile and not; dropped slots; several tokens of one expert; biases.
    @pytest.mark.parametrize("hidden, inner", [(72, 40), (64, 32)])
    @pytest.mark.parametrize(
        "tokens, activation, interleaved, biased", [(1, "swiglu", False, False), (4, "gpt_oss", True, True)]
    )
    def test_mlp(tokens, activation, interleaved, biased, hidden, inner, tiles):
        ids, o = make(tokens, 3, 4, hidden, inner, biased, dropped=0.2, seed=3)
        o["topk_weights"][ids == 4] = float("inf")
        o = half(o)
        found = mlp(ids, o, activation, interleaved)
        kept = {n: None if t is None else t.double() for n, t in o.items()}
        assert error(found, naive(ids, kept, activation, interleaved)) < 6e-3

    def test_an_expert_twice_in_a_token_and_ids_out_of_range():
        _, o = make(3, 3, 4, 64, 32)
        o = half(o, torch.float16)
        ids = torch.tensor([[2, 2, 1], [-1, 2**32 + 1, 0], [4, 5, -7]])
        found = mlp(ids, o)
        expected = naive(ids, {n: None if t is None else t.double() for n, t in o.items()})
        assert error(found[:2], expected[:2]) < 2e-3
        assert not found[2].any()

    def test_moe_mlp_takes_it_without_gradients_only(monkeypatch):
        ids, o = make(2, 2, 4, 64, 32)
        o, calls = half(o), []
        arguments = (o["x"], o["gate_up"], o["down"], ids, o["topk_weights"])
        real = _few.mlp
        monkeypatch.setattr(_few, "mlp", lambda *a: calls.append(1) or real(*a))
        expected = moe_mlp(*arguments)
        assert calls == [1]
        o["x"].requires_grad_()
        assert error(moe_mlp(*arguments).detach(), expected.double()) < 6e-3 and calls == [1]
        with torch.no_grad():
            assert torch.equal(moe_mlp(*arguments), expected) and calls == [1, 1]

    def test_what_it_takes():
        ids, o = make(2, 2, 4, 64, 32)
        x, gate_up = o["x"].bfloat16(), o["gate_up"].bfloat16()
        assert _few.serves(x, ids, gate_up, None)
        assert not _few.serves(o["x"], ids, gate_up)
        assert not _few.serves(x, ids, gate_up.transpose(1, 2))
        assert _few.serves(x, ids.repeat(2, 1), gate_up) and not _few.serves(x, ids.repeat(3, 1)[:5], gate_up)
        assert not _few.serves(x[:0], ids[:0], gate_up)
        assert not _few.serves(x, ids.repeat(1, 17), gate_up)

    @pytest.mark.parametrize("biased", [False, True])
    def test_logits(biased):
        torch.manual_seed(0)
        x, router = torch.randn(3, 72).bfloat16(), torch.randn(11, 72).bfloat16()
        bias = torch.randn(11).bfloat16() if biased else None
        expected = x.double() @ router.double().t() + (0 if bias is None else bias.double())
        for operand in (x, x.t().contiguous().t()):
            assert error(_few.logits(operand, router, bias), expected) < 4e-3

    def test_whose_router_it_reads():
        x, router, bias = torch.randn(3, 72).bfloat16(), torch.randn(11, 72).bfloat16(), torch.randn(11).bfloat16()
        assert _few.reads_router(x, router, None) and _few.reads_router(x, router, bias)
        assert not _few.reads_router(x, router, bias.float())
        assert not _few.reads_router(x.float(), router.float(), None)
        assert not _few.reads_router(x, torch.randn(72, 11).bfloat16().t(), None)
        assert not _few.reads_router(x.repeat(6, 1), router, None)
        assert not _few.reads_router(x[:0], router, None)
        # Too many multiplications: DeepSeek-V3's router with five tokens, not with four.
        wide, large = torch.randn(5, 7168).bfloat16(), torch.randn(256, 7168).bfloat16()
        assert _few.reads_router(wide[:4], large, None) and not _few.reads_router(wide, large, None)
        router.requires_grad_()
        assert not _few.reads_router(x, router, None)
        with torch.no_grad():
            assert _few.reads_router(x, router, None)

    @pytest.mark.parametrize("score", ["softmax", "sigmoid"])
    def test_layer(score):
        torch.manual_seed(1)
        layer = MoE(64, 32, 8, 2, score=score, dtype=torch.bfloat16)
        x = torch.randn(2, 64).bfloat16()
        with torch.no_grad():
            found = layer(x)
            routing = route(layer.logits(x), layer.config, bias=layer.correction_bias)
        wide = {n: t.detach().double() for n, t in layer.named_parameters()}
        expected = naive(
            routing.topk_ids,
            {"x": x.double(), "topk_weights": routing.topk_weights.double(), "gate_up_bias": None, "down_bias": None}
            | {n: wide[n] for n in ("gate_up", "down")},
        )
        assert error(found, expected) < 6e-3
