"""permutation on the CPU: against its definition slot by slot, dropped slots, edges, the operator, errors."""

import numpy as np
import pytest
import torch

from expertile.moe import permute
from expertile.moe.permute import permutation
from tests.support.cuda_emulator import needs_compiler, on_host, shows, without


def draw(tokens, top_k, experts, dropped=0.0, seed=0, dtype=torch.int32):
    """Distinct experts for each token, some of them dropped (id = experts)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, experts, generator=generator).argsort(1)[:, :top_k]
    return torch.where(torch.rand(ids.shape, generator=generator) < dropped, experts, ids).to(dtype)


def assert_right(found, topk_ids, experts):
    """The definition, slot by slot."""
    top_k, flat = topk_ids.shape[1], topk_ids.flatten().tolist()
    order = [s for e in range(experts) for s, expert in enumerate(flat) if expert == e]
    rest = [0] * (len(flat) - len(order))
    positions = [-1] * len(flat)
    for row, slot in enumerate(order):
        positions[slot] = row
    counts = torch.tensor([flat.count(e) for e in range(experts)])
    assert found.slots.tolist() == order + rest
    assert found.rows.tolist() == [s // top_k for s in order] + rest
    assert found.positions.flatten().tolist() == positions and found.positions.shape == topk_ids.shape
    assert found.offs.tolist() == counts.cumsum(0).tolist()
    assert {x.dtype for x in (found.offs, found.rows, found.slots, found.positions)} == {torch.int32}


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("tokens, top_k, experts, dropped", [(1, 1, 1, 0), (7, 3, 5, 0.3), (90, 2, 6, 0.5)])
def test_definition(tokens, top_k, experts, dropped, dtype):
    ids = draw(tokens, top_k, experts, dropped, dtype=dtype)
    assert_right(permutation(ids, experts), ids, experts)


def test_all_to_one_expert_all_dropped_and_nobody():
    for ids in (torch.full((9, 1), 3), torch.full((9, 2), 4), torch.empty(0, 2, dtype=torch.int32)):
        assert_right(permutation(ids, 4), ids, 4)


def test_ids_out_of_range_are_dropped_and_never_clamped():
    ids = torch.tensor([[0, -1], [2**32 + 1, 1], [5, 4]])
    assert permutation(ids, 4).positions.tolist() == [[0, -1], [-1, 1], [-1, -1]]


@pytest.mark.parametrize("wrong", [-2, 5])
def test_ids_out_of_range_are_told_when_asked(wrong):
    permutation(torch.tensor([[-1, 4]]), 4, check=True)
    with pytest.raises(ValueError, match=rf"topk_ids: expected -1 … 4 \(-1 and 4 = dropped\), got {wrong}"):
        permutation(torch.tensor([[0, wrong]]), 4, check=True)


@pytest.mark.parametrize(
    "ids, experts, message",
    [
        ([[0]], 2, "topk_ids: expected a torch.Tensor, got list"),
        (torch.zeros(3, dtype=torch.int32), 2, r"topk_ids: expected shape \[T, k\], int32 or int64, got \[3\]"),
        (torch.zeros(3, 1), 2, "got .* torch.float32"),
        (torch.zeros(3, 1, dtype=torch.int32), 0, "num_experts: expected an integer of at least 1, got 0"),
    ],
)
def test_errors(ids, experts, message):
    with pytest.raises(ValueError, match=message):
        permutation(ids, experts)


def test_operator():
    torch.library.opcheck(torch.ops.expertile.moe_permutation, (draw(9, 2, 4, 0.2), 4))
    compiled = torch.compile(lambda ids: permutation(ids, 6), fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 8):
        ids = draw(tokens, 2, 6, 0.2)
        assert_right(compiled(ids), ids, 6)


def test_a_number_of_experts_may_be_numpys() -> None:
    ids = torch.tensor([[0, 2], [1, 2]])
    assert torch.equal(permutation(ids, np.int64(3)).offs, permutation(ids, 3).offs)


@pytest.fixture
def prepare(tmp_path_factory):
    """Have `_permute.cu` run on the host, with a fault planted in it or none."""
    folder = tmp_path_factory.getbasetemp() / "permute"
    folder.mkdir(exist_ok=True)

    def prepared(patch, seed=0, fault=str):
        on_host(patch, folder, seed=seed, fault=fault)
        for kept in ("_cuda_kernel", "_cuda_launches"):
            made = getattr(permute, kept)
            patch.setattr(permute, kept, getattr(made, "__wrapped__", made))

    return prepared


def assert_right_in_cuda(ids, experts):
    # With room around them, for what a fault writes beside them.
    room = [torch.full((x.numel() + 2 * 8192,), -7, dtype=torch.int32) for x in permute._empty(ids, experts)]
    offs, rows, slots, positions = (x[8192:-8192] for x in room)
    parts = offs, rows, slots, positions.view(ids.shape)
    permute._by_cuda(ids, experts, parts)
    assert_right(permute.Permutation(*parts), ids, experts)


@needs_compiler
@pytest.mark.parametrize(
    "tokens, top_k, experts, dropped, dtype",
    [
        (400, 3, 5, 0.0, torch.int32),
        (1024, 2, 40, 0.3, torch.int64),
        (150, 8, 300, 0.1, torch.int32),
        (5, 1, 2048, 0.0, torch.int64),
        (128, 8, 128, 0.2, torch.int32),
    ],
    ids=str,
)
def test_definition_in_cuda(monkeypatch, prepare, tokens, top_k, experts, dropped, dtype):
    prepare(monkeypatch, seed=tokens)
    monkeypatch.setattr(permute, "_LARGE", 1200)
    assert_right_in_cuda(draw(tokens, top_k, experts, dropped, dtype=dtype), experts)


@needs_compiler
def test_one_expert_for_all_or_none_and_ids_out_of_range_in_cuda(monkeypatch, prepare):
    prepare(monkeypatch)
    strange = torch.tensor([[0, -1], [2**32 + 1, 1], [5, 4]]).repeat(400, 1)
    for ids in (torch.full((2100, 1), 3), torch.full((700, 2), 4), strange):
        assert_right_in_cuda(ids, 4)


@needs_compiler
@pytest.mark.parametrize(
    "fault",
    [
        without("count_slots", "__syncthreads", 1),
        without("place_slots", "__syncthreads", 3),  # those before lead to rows anywhere
        without("place_slots", "__syncwarp"),  # the second is one with `match` of the next slots here
    ],
)
def test_a_missing_barrier_shows_in_cuda(monkeypatch, prepare, fault):
    shows(
        monkeypatch, lambda patch, seed: prepare(patch, seed, fault), lambda: assert_right_in_cuda(draw(700, 3, 9), 9)
    )
