"""The layer's kernels on the CPU, through Triton's interpreter: permutation, router, token rounding, index tables of
expert parallelism."""

from tests.support import interpreter

if not interpreter.active():

    def test_under_the_interpreter():
        interpreter.run_file_interpreted(__file__)

else:
    import pytest
    import torch

    from expertile.moe import _select, dispatch, dispatch_formulas, dispatch_kernels, permute, rounding, router
    from expertile.moe._placement import Placement
    from expertile.ops.low_rank import api as low_rank
    from tests.moe.test_permute import assert_right, draw
    from tests.moe.test_rounding import draw as draw_candidates
    from tests.moe.test_router import MODELS, bias_of, logits_of

    interpreter.repair()

    @pytest.mark.parametrize("tokens, top_k, experts", [(1, 1, 1), (40, 3, 9), (12, 8, 40)])
    def test_one_launch(tokens, top_k, experts):
        ids = draw(tokens, top_k, experts, 0.2)
        assert_right(permute.permutation(ids, experts), ids, experts)

    # A remainder of a block and of a program's blocks; one expert with everything; more experts than a block has slots.
    @pytest.mark.parametrize("tokens, top_k, experts, dropped", [(421, 3, 9, 0.1), (1300, 1, 1, 0), (700, 2, 200, 0.5)])
    def test_three_launches(tokens, top_k, experts, dropped):
        ids = draw(tokens, top_k, experts, dropped, dtype=torch.int64)
        assert tokens * top_k > permute.SMALL
        assert_right(permute.permutation(ids, experts), ids, experts)

    def test_the_scan_carries_over_chunks():
        counts = torch.randint(0, 9, (3, 700), dtype=torch.int32)
        truth, totals = counts.cumsum(1) - counts, torch.empty(3, dtype=torch.int32)
        permute._scan_kernel[(3,)](found := counts.clone(), totals, 700, CHUNK=256, PDL=False)
        assert torch.equal(found.long(), truth) and torch.equal(totals.long(), counts.sum(1))

    def test_ids_that_do_not_fit_32_bits():
        ids = torch.full((600, 2), 2**32, dtype=torch.int64)
        ids[:, 1] = 1
        found = permute.permutation(ids, 2)
        assert found.offs.tolist() == [0, 600] and (found.positions[:, 0] == -1).all()

    def assert_as_torch(logits, config, bias=None, want_scores=True):
        plan = router.plan_of(config)
        found = _select._select_on_device(logits, bias, want_scores, plan)
        weights, ids, scores = _select._select_in_torch(logits, bias, want_scores, plan)
        assert torch.equal(found[1], ids)
        torch.testing.assert_close(found[0], weights, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[2], scores, rtol=1e-5, atol=1e-6)
        dweights, dscores = torch.randn(weights.shape), torch.randn(scores.shape) if want_scores else None
        grads = [f(logits, ids, dweights, dscores, plan) for f in (_select.select_backward, _select._backward_in_torch)]
        assert grads[0].dtype is logits.dtype
        torch.testing.assert_close(*grads, rtol=1e-2 if logits.dtype is torch.bfloat16 else 1e-4, atol=1e-5)

    @pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
    def test_router_of_models(config):
        assert_as_torch(logits_of(21, config), config, bias_of(config))

    def test_router_of_many_experts_strides_and_bfloat16():
        config = router.RouterConfig(300, 5)
        logits = logits_of(3, config, dtype=torch.bfloat16)
        assert_as_torch(logits, config, want_scores=False)
        wide = torch.randn(3, 320).to(torch.bfloat16)
        assert_as_torch(wide[:, :300], config)

    @pytest.mark.parametrize("score", ["softmax", "sigmoid"])
    def test_router_ties_nan_and_infinity(score):
        config = router.RouterConfig(6, 4, score=score, normalize=False)
        inf, nan = float("inf"), float("nan")
        logits = torch.tensor(
            [[1.0, 2, 2, 1, 2, 0], [-0.0, 0, -1, -0.0, 0, -1], [-inf, 1, -inf, -inf, 0, -inf], [0, nan, 1, 2, -nan, 3]]
        )
        plan = router.plan_of(config)
        for x in (logits, logits.to(torch.bfloat16)):
            found, truth = (f(x, None, True, plan)[1] for f in (_select._select_on_device, _select._select_in_torch))
            assert torch.equal(found, truth) and truth[0].tolist() == [1, 2, 4, 0]

    # The last in several blocks of rows for each expert.
    @pytest.mark.parametrize(
        "mode, factor, block",
        [("none", 0.7, 64), ("down", None, 64), ("up", None, 64), ("nearest", 0.7, 64), ("adaptive", None, 16)],
    )
    def test_rounding_as_torch(mode, factor, block, monkeypatch):
        monkeypatch.setattr(rounding, "_BLOCK", block)
        ids, weights = draw_candidates(50, 3, 4, 2, dropped=0.1)
        arguments = (ids, weights, 4, 2, 8, mode)
        truth = rounding._in_torch(*arguments, rounding._capacity(50, 2, 4, factor))
        assert torch.equal(rounding._rounded(*arguments, factor), truth)

    def test_rounding_of_experts_without_rows():
        ids = torch.tensor([[3], [3], [3]], dtype=torch.int32)
        assert rounding.round_groups(ids, torch.rand(3, 1), 5, tile=2, mode="up").tolist() == [[3], [3], [3]]
        assert rounding.round_groups(ids, torch.rand(3, 1), 5, tile=4, mode="down").tolist() == [[5], [5], [5]]

    def plans_of(make, monkeypatch, ids, weights, placement, capacity, max_tokens):
        """All ranks' plans with index tables by the module `make`: outgoing, and incoming where anything comes."""
        monkeypatch.setattr(dispatch, "_maker", lambda x: make)
        monkeypatch.setattr(permute, "on_kernels", lambda x: False)
        world, chunks, arrived = placement.world, placement.chunks, []
        keyed = [make.token_keys(i, placement, capacity is None) for i in ids]
        sent = [
            dispatch.outgoing(i, w, keys, placement, capacity, max_tokens)
            for i, w, (keys, _) in zip(ids, weights, keyed, strict=True)
        ]
        if capacity is None:
            counts = torch.stack([c[0] for _, c in keyed])  # from, to, rows or slots, chunk
            lengths = [[c[r, 0, chunk].item() for chunk in range(chunks) for r in range(world)] for c in counts]
        else:
            lengths = [[min(capacity, max_tokens)] * placement.keys] * world
        segments = [s.labels[: sum(n)].split(n) for s, n in zip(sent, lengths, strict=True)]
        for rank in range(world):
            labels = torch.cat([segments[r][c * world + rank] for c in range(chunks) for r in range(world)])
            if capacity is None:
                theirs = counts[:, rank].contiguous()
                splits = dispatch.Splits.counted(torch.stack([counts[rank], theirs]).tolist())
            else:
                theirs, splits = None, dispatch.Splits.full(placement, capacity, max_tokens)
            if len(labels):
                arrived.append(dispatch.incoming(labels, theirs, splits, placement, rank, capacity, max_tokens))
        return sent, arrived, keyed

    # Tables in several programs; ranks and chunks that are no powers of two; segments that are too short for all.
    @pytest.mark.parametrize(
        "world, chunks, experts, top_k, tokens, capacity, dtype",
        [
            (2, 1, 8, 3, (400, 1), None, torch.int64),
            (3, 2, 11, 2, (30, 7, 19), None, torch.int32),
            (1, 2, 4, 4, (9,), None, torch.int32),
            (2, 1, 8, 3, (300, 5), 900, torch.int32),
            (3, 1, 11, 2, (30, 7, 19), 9, torch.int64),
            (4, 3, 13, 1, (5, 1, 7, 3), None, torch.int32),
            (4, 2, 9, 2, (5, 1, 7, 3), None, torch.int32),
            (4, 1, 9, 2, (5, 1, 7, 3), 14, torch.int32),
        ],
    )
    def test_tables_of_expert_parallelism(world, chunks, experts, top_k, tokens, capacity, dtype, monkeypatch):
        made = torch.Generator().manual_seed(world)
        ids = [torch.rand(n, experts, generator=made).argsort(1)[:, :top_k].to(dtype) for n in tokens]
        # A dropped slot, and two whose ids are no experts.
        wrong = [experts, -1, 2**32 + 1 if dtype is torch.int64 else 2**31 - 1]
        ids[0] = torch.cat([torch.tensor(wrong, dtype=dtype), ids[0].flatten()[3:]]).view(ids[0].shape)
        weights = [torch.rand(i.shape, generator=made) for i in ids]
        placement = Placement(experts, world, chunks)
        arguments = (monkeypatch, ids, weights, placement, capacity, max(tokens))
        found = plans_of(dispatch_kernels, *arguments)
        truth = plans_of(dispatch_formulas, *arguments)
        for one, other in zip(found[2], truth[2], strict=True):
            assert torch.equal(one[0], other[0])
            assert one[1] is other[1] is None or (one[1].dtype is torch.int32 and torch.equal(one[1], other[1]))
        assert capacity != 9 or sum(int(s.overflow) for s in truth[0]) > 0, "nothing overflows"
        for kind in (0, 1):
            for one, other in zip(found[kind], truth[kind], strict=True):
                for name, x in vars(other).items():
                    got = getattr(one, name)
                    if name != "order":
                        assert x is got is None or (got.dtype is x.dtype and torch.equal(got, x)), name

    def test_picked_values():
        values, at = torch.randn(7, 90), torch.randint(-1, 630, (300, 3), dtype=torch.int32)
        assert torch.equal(dispatch_kernels.picked(values, at), dispatch_formulas.picked(values, at))
        nothing = dispatch_kernels.picked(values[:0], torch.full((2, 2), -1, dtype=torch.int32))
        assert torch.equal(nothing, torch.zeros(2, 2))

    @pytest.mark.parametrize("activation, interleaved", [("swiglu", False), ("gpt_oss", True)])
    def test_activation_of_frozen_experts(activation, interleaved, monkeypatch):
        """The kernels against the formulas that traced calls take, dropped slots included."""
        ids, g = draw(21, 3, 5, 0.2), torch.Generator().manual_seed(0)
        order, weights = permute.permutation(ids, 5), torch.rand(21, 3, generator=g)
        a, pre = torch.randn(63, 24, generator=g), torch.randn(63, 48, generator=g)
        used = int(order.offs[-1])
        form = (order.slots, order.positions, weights, order.offs, (activation, interleaved))
        dpre, act_w, dweights, _ = low_rank.backward(a.clone(), pre, None, None, None, None, *form)
        act, _ = low_rank.activated(pre, None, None, None, order.offs, (activation, interleaved))
        monkeypatch.setattr(low_rank, "on_device", lambda pre: False)
        want = low_rank.backward(a, pre, None, None, None, None, *form)
        torch.testing.assert_close(dpre[:used], want[0][:used])
        torch.testing.assert_close(act_w[:used], want[1][:used])
        torch.testing.assert_close(dweights, want[2])
        wanted_act, _ = low_rank.activated(pre, None, None, None, order.offs, (activation, interleaved))
        torch.testing.assert_close(act[:used], wanted_act[:used])
        assert (dweights[order.positions < 0] == 0).all() and (order.positions < 0).any()
