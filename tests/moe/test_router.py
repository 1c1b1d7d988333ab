"""route on the CPU: against each model's formula written out in float64, ties, groups, dropping, gradients, errors."""

import math

import pytest
import torch

from expertile.moe.router import RouterConfig, route

MODELS = {
    "switch": RouterConfig(6, 1, normalize=False),
    "mixtral": RouterConfig(8, 2, order="topk_then_softmax", normalize=False),
    "qwen3": RouterConfig(8, 3),
    "deepseek-v2": RouterConfig(12, 3, normalize=False, scale=16.0, num_groups=4, top_groups=2, group_score="max"),
    "deepseek-v3": RouterConfig(16, 4, score="sigmoid", scale=2.5, num_groups=4, top_groups=2),
    "three groups": RouterConfig(9, 2, num_groups=3, top_groups=2),
    "candidates": RouterConfig(8, 2, rounding="up", tile=1),
    "softmax of two of three": RouterConfig(8, 2, order="topk_then_softmax", normalize=False, rounding="up", tile=1),
}


def logits_of(tokens, config, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, config.num_experts, generator=generator).to(dtype)


def bias_of(config):
    if config.score == "softmax":
        return None
    return torch.randn(config.num_experts, generator=torch.Generator().manual_seed(9)) / 4


def naive(logits, config, bias=None):
    """(ids, weights) token by token, in float64 and differentiable: what a reader of the papers would write."""
    ids, weights = [], []
    for row in logits.double():
        scores = row.sigmoid() if config.score == "sigmoid" else row.softmax(0)
        choice = scores.detach() + (0 if bias is None else bias.double())
        allowed = range(config.num_experts)
        if config.num_groups is not None:
            groups = torch.arange(config.num_experts).view(config.num_groups, -1)
            best = [choice[g].topk(2 if config.group_score == "top2" else 1).values.sum().item() for g in groups]
            chosen = sorted(range(config.num_groups), key=lambda g: (-best[g], g))[: config.top_groups]
            allowed = [e for g in chosen for e in groups[g].tolist()]
        order = sorted(allowed, key=lambda e: (-choice[e].item(), e))[: config.columns]
        top = order[: config.top_k]
        if config.order == "topk_then_softmax" and config.score == "softmax":
            chosen_weights = (row[order] - row[top].logsumexp(0)).exp()
        else:
            chosen_weights = scores[order]
        if config.normalize:
            chosen_weights = chosen_weights / chosen_weights[: config.top_k].sum()
        ids.append(order)
        weights.append(chosen_weights * config.scale)
    return torch.tensor(ids), torch.stack(weights)


def assert_right(logits, config, bias=None):
    """Values and gradients against `naive`."""
    logits = logits.detach().requires_grad_()
    found = route(logits, config, bias=bias)
    exact = logits.detach().double().requires_grad_()
    ids, weights = naive(exact, config, bias)
    kept = found.topk_ids < config.num_experts
    assert torch.equal(found.topk_ids[kept].long(), ids[kept]) and found.topk_ids.dtype is torch.int32
    torch.testing.assert_close(found.topk_weights.double(), weights * kept, rtol=1e-5, atol=1e-6)
    scores = exact.sigmoid() if config.score == "sigmoid" else exact.softmax(1)
    torch.testing.assert_close(found.scores.double(), scores, rtol=1e-5, atol=1e-6)
    g, h = torch.randn(weights.shape), torch.randn(scores.shape)
    (grad,) = torch.autograd.grad((found.topk_weights * g).sum() + (found.scores * h).sum(), logits)
    (truth,) = torch.autograd.grad((weights * kept * g).sum() + (scores * h).sum(), exact)
    torch.testing.assert_close(grad.double(), truth, rtol=1e-4, atol=1e-5 * config.scale)


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_models(config):
    assert_right(logits_of(33, config), config, bias_of(config))


def test_weights_alone_and_scores_alone_have_gradients():
    config = MODELS["qwen3"]
    for part in ("topk_weights", "scores"):
        logits = logits_of(5, config).requires_grad_()
        getattr(route(logits, config), part).square().sum().backward()
        assert logits.grad.abs().sum() > 0
    assert route(logits, config, want_scores=False).scores is None


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_ties_go_to_the_lower_expert(score):
    config = RouterConfig(6, 4, score=score)
    logits = torch.tensor([[1.0, 2, 2, 1, 2, 0], [0, 0, 0, 0, 0, 0], [-0.0, 0, -1, -0.0, 0, -1]])
    assert route(logits, config).topk_ids.tolist() == [[1, 2, 4, 0], [0, 1, 2, 3], [0, 1, 3, 4]]


def test_masked_experts_are_never_chosen_before_others_and_nan_is_seen():
    logits = torch.full((2, 5), float("-inf"))
    logits[:, 3] = 1.0
    logits[1, 4] = float("nan")
    assert route(logits, RouterConfig(5, 2)).topk_ids.tolist() == [[3, 0], [4, 3]]


def test_the_bias_chooses_and_does_not_weigh():
    config = RouterConfig(4, 1, score="sigmoid", normalize=False)
    logits, bias = torch.tensor([[0.5, 0.0, -1.0, 0.0]]), torch.tensor([0.0, 0, 2, 0], requires_grad=True)
    found = route(logits.requires_grad_(), config, bias=bias)
    assert found.topk_ids.tolist() == [[2]]
    torch.testing.assert_close(found.topk_weights, torch.tensor([[-1.0]]).sigmoid())
    found.topk_weights.sum().backward()
    assert bias.grad is None


def test_bfloat16_logits():
    config = MODELS["qwen3"]
    logits = logits_of(20, config, dtype=torch.bfloat16).requires_grad_()
    found = route(logits, config)
    torch.testing.assert_close(found.topk_weights, route(logits.detach().float(), config).topk_weights)
    (grad,) = torch.autograd.grad(found.topk_weights[:, 0].sum(), logits)
    assert grad.dtype is torch.bfloat16


def test_capacity_drops_the_lowest_weights():
    config = RouterConfig(2, 1, normalize=False, capacity_factor=0.5)
    logits = torch.tensor([[1.0, 0], [4, 0], [2, 0], [3, 0], [0, 1], [0, 9], [0, 5], [7, 0]])
    found = route(logits, config)  # 2 slots for each expert
    assert found.topk_ids[:, 0].tolist() == [2, 0, 2, 2, 2, 1, 1, 0]
    assert (found.topk_weights[:, 0] > 0).tolist() == [False, True, False, False, False, True, True, True]


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    config = RouterConfig(4, 2, capacity_factor=4.0)
    logits = logits_of(tokens, config).requires_grad_()
    found = route(logits, config)
    assert found.topk_ids.shape == found.topk_weights.shape == (tokens, 2) and found.scores.shape == (tokens, 4)
    assert torch.autograd.grad(found.topk_weights.sum(), logits)[0].shape == (tokens, 4)


def test_operators():
    ops, plan = torch.ops.expertile, (2, 3, False, False, True, 1.0, 2, 1, True, False)
    logits, bias = torch.randn(5, 8, requires_grad=True), torch.randn(8)
    for want_scores in (True, False):
        torch.library.opcheck(ops.moe_select, (logits, bias, want_scores, *plan))
    ids = torch.tensor([[0, 1, 2]] * 5, dtype=torch.int32)
    torch.library.opcheck(ops.moe_select_backward, (logits.detach(), ids, torch.randn(5, 3), None, *plan))


def test_compiles_whole():
    config = RouterConfig(8, 2, capacity_factor=1.0)
    compiled = torch.compile(lambda x: route(x, config), fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (6, 9):
        x = logits_of(tokens, config).requires_grad_()
        found, eager = compiled(x), route(x, config)
        assert torch.equal(found.topk_ids, eager.topk_ids)
        torch.testing.assert_close(
            torch.autograd.grad(found.topk_weights.square().sum(), x),
            torch.autograd.grad(eager.topk_weights.square().sum(), x),
        )


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(top_k=9), "top_k: expected 1 … 8, the experts there are, got 9"),
        (dict(top_k=0), "top_k: expected 1 … 8"),
        (dict(score="relu"), "score: expected softmax or sigmoid, got 'relu'"),
        (dict(order="both"), "order: expected softmax_then_topk or"),
        (dict(num_groups=4), "num_groups, top_groups: expected both or neither"),
        (dict(num_groups=3, top_groups=1), "num_groups: expected a divisor of 8, got 3"),
        (dict(num_groups=8, top_groups=2), "group_score: expected max for groups of 1 expert"),
        (dict(num_groups=4, top_groups=5), "top_groups: expected 1 … 4, got 5"),
        (dict(num_groups=8, top_groups=1, group_score="max"), "top_k: expected at most 1, the experts of top_groups"),
        (dict(num_experts=None), "num_experts: expected an integer of at least 1, got None"),
        (dict(top_k=1.5), "top_k: expected 1 … 8, .* got 1.5"),
        (dict(candidates=-1), "candidates: expected an integer of at least 0, got -1"),
        (dict(candidates=1.5), "candidates: expected an integer of at least 0, got 1.5"),
        (dict(tile=None), "tile: expected an integer of at least 1, got None"),
        (dict(scale=None), "scale: expected a finite number, got None"),
        (dict(scale=math.nan), "scale: expected a finite number, got nan"),
        (dict(scale=torch.ones(1)), "scale: expected a finite number, got tensor"),
        (dict(normalize="yes"), "normalize: expected True or False, got 'yes'"),
        (dict(num_groups=1.5, top_groups=1), "num_groups: expected an integer of at least 1, got 1.5"),
        (dict(capacity_factor="a"), "capacity_factor: expected a finite number, got 'a'"),
        (dict(capacity_factor=math.inf), "capacity_factor: expected a finite number, got inf"),
        (dict(capacity_factor=0.0), "capacity_factor: expected a positive number or None, got 0.0"),
        (dict(rounding="sideways"), "rounding: expected None or one of"),
    ],
)
def test_config_errors(wrong, message):
    with pytest.raises(ValueError, match=message):
        RouterConfig(**{"num_experts": 8, "top_k": 2, **wrong})


@pytest.mark.parametrize(
    "logits, bias, message",
    [
        ([[0.0]], None, "logits: expected a torch.Tensor, got list"),
        (torch.zeros(3, 4), None, r"logits: expected shape \[T, 8\], .* got \[3, 4\] torch.float32"),
        (torch.zeros(3, 8, dtype=torch.int32), None, "got .* torch.int32"),
        (torch.zeros(3, 8), torch.zeros(7), r"bias: expected shape \[8\], floating point, on cpu, got \[7\]"),
        (torch.zeros(3, 8), [0.0], r"bias: expected shape \[8\], floating point, on cpu, got list"),
    ],
)
def test_errors(logits, bias, message):
    with pytest.raises(ValueError, match=message):
        route(logits, RouterConfig(8, 2), bias=bias)
    for config in (None, {}):
        with pytest.raises(ValueError, match="config: expected a RouterConfig, got (NoneType|dict)"):
            route(torch.zeros(3, 8), config)
