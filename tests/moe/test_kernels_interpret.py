"""The layer's kernels on the CPU, through Triton's interpreter: permutation, router and token rounding."""

from __future__ import annotations

from tests.support import interpreter

if not interpreter.active():

    def test_under_the_interpreter():
        interpreter.run_file_interpreted(__file__)

else:
    import pytest
    import torch

    from expertile.moe import permute, rounding, router
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
        permute._scan_kernel[(3,)](found := counts.clone(), totals, 700, CHUNK=256)
        assert torch.equal(found.long(), truth) and torch.equal(totals.long(), counts.sum(1))

    def test_ids_that_do_not_fit_32_bits():
        ids = torch.full((600, 2), 2**32, dtype=torch.int64)
        ids[:, 1] = 1
        found = permute.permutation(ids, 2)
        assert found.offs.tolist() == [0, 600] and (found.positions[:, 0] == -1).all()

    def assert_as_torch(logits, config, bias=None, want_scores=True):
        plan = router._plan(config)
        found = router._select_on_device(logits, bias, want_scores, plan)
        weights, ids, scores = router._select_in_torch(logits, bias, want_scores, plan)
        assert torch.equal(found[1], ids)
        torch.testing.assert_close(found[0], weights, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found[2], scores, rtol=1e-5, atol=1e-6)
        dweights, dscores = torch.randn(weights.shape), torch.randn(scores.shape) if want_scores else None
        grads = [f(logits, ids, dweights, dscores, plan) for f in (router._backward, router._backward_in_torch)]
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
        plan = router._plan(config)
        for x in (logits, logits.to(torch.bfloat16)):
            found, truth = (f(x, None, True, plan)[1] for f in (router._select_on_device, router._select_in_torch))
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
