"""The auxiliary losses and the statistics of experts, against their definitions and their known values."""

import pytest
import torch

from expertile.moe.losses import load_balancing_loss, z_loss
from expertile.moe.statistics import expert_statistics, tokens_per_expert


def test_load_balancing_is_k_when_even_and_k_times_e_when_not():
    ids = torch.arange(8).view(4, 2)
    even = torch.full((4, 8), 1 / 8, requires_grad=True)
    assert load_balancing_loss(even, ids, 8).item() == pytest.approx(2)
    one = torch.zeros(4, 8)
    one[:, 3] = 1
    assert load_balancing_loss(one, torch.full((4, 1), 3), 8).item() == pytest.approx(8)
    assert load_balancing_loss(one, torch.full((4, 1), 8), 8).item() == 0  # all dropped


def test_load_balancing_is_mixtrals():
    torch.manual_seed(0)
    scores = torch.randn(30, 6).softmax(1).requires_grad_()
    ids = scores.topk(2).indices
    mask = torch.nn.functional.one_hot(ids, 6).float()
    expected = 6 * (mask.mean(0) * scores.mean(0)).sum()
    loss = load_balancing_loss(scores, ids, 6)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, scores), torch.autograd.grad(expected, scores))


def test_z_loss():
    logits = torch.tensor([[0.0, 0.0], [3.0, 3.0]], requires_grad=True)
    expected = (torch.log(torch.tensor(2.0)) ** 2 + (3 + torch.log(torch.tensor(2.0))) ** 2) / 2
    torch.testing.assert_close(z_loss(logits), expected)
    assert torch.autograd.grad(z_loss(logits), logits)[0].min() > 0


def test_no_tokens():
    assert load_balancing_loss(torch.zeros(0, 4), torch.zeros(0, 2, dtype=torch.int32), 4).item() == 0
    assert z_loss(torch.zeros(0, 4)).item() == 0


def test_errors():
    with pytest.raises(ValueError, match=r"scores: expected shape \[3, 4\], got \[3, 5\]"):
        load_balancing_loss(torch.zeros(3, 5), torch.zeros(3, 2, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match=r"logits: expected shape \[T, E\], got \[3\]"):
        z_loss(torch.zeros(3))
    with pytest.raises(ValueError, match=r"counts: expected shape \[E\], integers, got \[3\] torch.float32"):
        expert_statistics(torch.zeros(3))


def test_tokens_per_expert():
    ids = torch.tensor([[0, 3], [3, 4], [3, -1]])
    assert tokens_per_expert(ids, 4).tolist() == [1, 0, 0, 3]


@pytest.mark.parametrize(
    "counts, gini, cv, empty, largest",
    [
        ([5, 5, 5, 5], 0, 0, 0, 0.25),
        ([0, 0, 0, 8], 0.75, 3**0.5, 0.75, 1),
        ([1, 3], 0.25, 0.5, 0, 0.75),
        ([0, 0], 0, 0, 1, 0),
    ],
)
def test_statistics(counts, gini, cv, empty, largest):
    found = expert_statistics(torch.tensor(counts))
    values = [float(x) for x in (found.gini, found.cv, found.empty_share, found.max_share)]
    assert values == pytest.approx([gini, cv, empty, largest])


def test_gini_is_half_the_mean_difference():
    counts = torch.randint(0, 50, (17,))
    differences = (counts[:, None] - counts[None, :]).abs().double().mean()
    assert float(expert_statistics(counts).gini) == pytest.approx(float(differences / (2 * counts.double().mean())))
