"""sdpa_fa2 without a GPU: what it makes of FlashAttention 2's LSE."""

import math
from dataclasses import replace

import pytest
import torch

from expertile.ops.attention.backends import sdpa
from tests.ops.attention.cases import CASES, Case, make


def _by_fa2(lse: torch.Tensor) -> torch.Tensor:
    """As FlashAttention 2 returns it: plus infinity where a row sees no key."""
    return lse.masked_fill(lse == -math.inf, math.inf)


@pytest.mark.parametrize("case", [c for c in CASES if c.q_lens != c.k_lens], ids=str)
def test_rows_without_keys_have_minus_infinity(case: Case) -> None:
    made = make(case)
    assert torch.equal(sdpa._without_keys(made.problem, _by_fa2(made.lse)), made.lse)


def test_only_rows_without_keys_change() -> None:
    made = make(next(c for c in CASES if c.packed))
    lse = made.lse.clone()
    lse[0, 0] = math.nan
    assert bool(sdpa._without_keys(made.problem, lse.clone())[0, 0].isnan())


def test_nothing_is_done_where_every_row_sees_a_key() -> None:
    made = make(Case("more keys", 40, 70, causal=True))
    for problem in (made.problem, replace(made.problem, causal=False, q_len=100)):
        lse = torch.full_like(made.lse, math.inf)
        assert bool((sdpa._without_keys(problem, lse) == math.inf).all())
