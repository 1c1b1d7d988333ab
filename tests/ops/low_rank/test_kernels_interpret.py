"""The kernels of small rank on the CPU, through Triton's interpreter, against the formulas that stand in for them."""

from tests.support import interpreter

if not interpreter.active():

    def test_under_the_interpreter():
        interpreter.run_file_interpreted(__file__)

else:
    import pytest
    import torch

    from expertile.moe.permute import permutation
    from expertile.ops.low_rank import api
    from tests.moe.test_permute import draw

    interpreter.repair()

    class Case:
        """Random operands; `bad` rows past the last expert's are NaN, and must reach nothing."""

        def __init__(self, dtype, hidden=72, inner=40, ranks=(16, 32), experts=5, tokens=30):
            self.generator, self.dtype = torch.Generator().manual_seed(3), dtype
            self.ids = draw(tokens, 3, experts, 0.2)
            self.order = permutation(self.ids, experts)
            self.offs, self.rows, self.slots = self.order.offs, self.order.rows, self.order.slots
            self.last = int(self.offs[-1])
            assert self.last < self.rows.shape[0]
            (first, second), count = ranks, self.rows.shape[0]
            self.x = self.normal(tokens, hidden)
            self.shrinking = self.normal(experts, first, hidden)
            self.pre, self.grad = self.past(count, 2 * inner), self.past(count, inner)
            self.u, self.b = self.past(count, first), self.normal(experts, 2 * inner, first)
            self.v, self.a = self.past(count, second), self.normal(experts, second, inner)
            self.y, self.wide = self.past(count, hidden), self.normal(experts, hidden, second)
            self.weights = torch.rand(tokens, 3, generator=self.generator)

        def normal(self, *shape):
            return torch.randn(shape, generator=self.generator).to(self.dtype)

        def past(self, *shape):
            made = self.normal(*shape)
            made[self.last :] = torch.nan
            return made

    def both(monkeypatch, call):
        found = call()
        with monkeypatch.context() as patch:
            patch.setattr(api, "on_device", lambda x: False)
            return found, call()

    def assert_alike(case, found, expected, ragged=True):
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[case.dtype]
        if ragged:
            found, expected = found[: case.last], expected[: case.last]
        assert found.dtype is expected.dtype and found.shape == expected.shape
        scale = expected.abs().max()
        assert torch.isfinite(found).all() and (found - expected).abs().max() <= tolerance * scale

    @pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    def case(request):
        return Case(request.param)

    @pytest.mark.parametrize("gathered", [True, False])
    def test_shrink(case, gathered, monkeypatch):
        x, rows = (case.x, case.rows) if gathered else (case.y.clone(), None)
        if not gathered:
            x[case.last :] = 0  # the formula's products read them
        for b in (case.shrinking.transpose(1, 2), case.shrinking.transpose(1, 2).contiguous()):
            assert_alike(
                case, *both(monkeypatch, lambda b=b: api.shrink(x, rows, b, case.offs, 0.5, api.Config(16, 32, 4)))
            )

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize(
        "first, second, overwrite", [(True, True, True), (True, False, False), (False, True, True)]
    )
    def test_forward_and_backward(case, first, second, overwrite, interleaved, monkeypatch):
        u, b = (case.u, case.b) if first else (None, None)
        v, a = (case.v, case.a) if second else (None, None)
        config = api.Config(16, 32, 4)

        def forward(dtype=None):
            return api.activated(case.pre, u, b, a, case.offs, ("swiglu", interleaved), 0.5, config, dtype)

        def backward():
            routing = (case.slots, case.order.positions, case.weights, case.offs)
            how = (("swiglu", interleaved), 0.5, overwrite, config)
            return api.backward(case.grad.clone(), case.pre.clone(), u, b, v, a, *routing, *how)

        (act, more), (true_act, true_more) = both(monkeypatch, forward)
        assert_alike(case, act, true_act)
        assert (more is None) == (true_more is None) == (not second)
        if second:
            assert_alike(case, more, true_more)
        wide = forward(torch.float32)
        assert wide[0].dtype is torch.float32 and torch.equal(wide[0].to(case.dtype)[: case.last], act[: case.last])
        assert more is None or torch.equal(wide[1][: case.last], more[: case.last])
        found, expected = both(monkeypatch, backward)
        for mine, true in zip(found[:2], expected[:2], strict=True):
            assert_alike(case, mine, true)
        assert_alike(case, found[2], expected[2], ragged=False)
        assert (found[3] is None) == (not first)
        if first:
            assert_alike(case, found[3], expected[3])

    @pytest.mark.parametrize("transposed", [False, True])
    def test_expand(case, transposed, monkeypatch):
        b = case.wide.transpose(1, 2).contiguous().transpose(1, 2) if transposed else case.wide
        found, expected = both(
            monkeypatch, lambda: api.expand(case.y.clone(), case.v, b, case.offs, api.Config(16, 32, 4))
        )
        assert_alike(case, found, expected)
        assert found[case.last :].isnan().all()

    @pytest.mark.parametrize(
        "gathered, weighted, last", [(True, True, True), (True, False, False), (False, False, True)]
    )
    def test_outer(case, gathered, weighted, last, monkeypatch):
        x, rows = (case.x, case.rows) if gathered else (case.pre, None)
        weights = (case.slots, case.weights) if weighted else None
        config = api.Config(16, 32, 4)
        found, expected = both(
            monkeypatch, lambda: api.outer(case.u, x, rows, case.offs, weighted=weights, last=last, config=config)
        )
        assert_alike(case, found, expected, ragged=False)

    def test_an_expert_without_rows(monkeypatch):
        case = Case(torch.float32, experts=40)
        sizes = torch.diff(case.offs, prepend=case.offs.new_zeros(1))
        assert (sizes == 0).any()
        found = api.outer(case.u, case.x, case.rows, case.offs, config=api.Config(16, 32, 4))
        assert not found[sizes == 0].any() and found[sizes > 0].any()

    @pytest.mark.parametrize("ranks, columns, experts", [((3, 16), 10, 5), ((16, 16), 40, 70), ((20, 32), 7, 3)])
    def test_turned_and_back(ranks, columns, experts):
        (few, rank), generator = ranks, torch.Generator().manual_seed(0)
        x = torch.randn(columns, few * experts, generator=generator)
        seen = x.unflatten(1, (few, experts)).permute(2, 0, 1)
        made = torch.full((experts, columns, rank), torch.nan, dtype=torch.bfloat16)
        api.turn(seen, made)
        assert torch.equal(made, torch.nn.functional.pad(seen, (0, rank - few)).bfloat16())
        back = torch.full_like(x, torch.nan)
        api.turn(made, back.unflatten(1, (few, experts)).permute(2, 0, 1))
        assert torch.equal(back, x.bfloat16().float())

    def test_factors_of_an_adapter_and_their_gradients():
        from expertile.moe.lora import Adapter

        generator = torch.Generator().manual_seed(0)
        a, b = (torch.randn(s, generator=generator).requires_grad_() for s in ((12, 24), (10, 12)))
        grads = []
        for dtype in (torch.float32, torch.float64):
            wide = [t.detach().to(dtype).requires_grad_() for t in (a, b)]
            made = Adapter(*wide, 1.0).factors(4, dtype)
            weights = (torch.randn(m.shape, generator=torch.Generator().manual_seed(1)).to(dtype) for m in made)
            loss = sum((m * w).sum() for m, w in zip(made, weights, strict=True))
            grads.append((*made, *torch.autograd.grad(loss, wide)))
        for found, expected in zip(*grads, strict=True):
            torch.testing.assert_close(found.double(), expected.double())
