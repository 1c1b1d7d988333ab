"""Expert parallelism with 2 and 4 processes on gloo: one process's bits and gradients, and errors that name a rank."""

import multiprocessing

import pytest
import torch

from expertile.moe._placement import Placement
from tests.moe import parallel_worker

_LIMIT_S = 60


def outcome_of(task, world: int, folder: str) -> tuple[list[dict[str, str]], list[int | None]]:
    """What each rank found in task(rank, world, folder), and how each ended."""
    # A server that has imported torch forks the ranks: a second each is saved, and no thread of pytest's is copied.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.moe.parallel_worker"])
    ranks = [context.Process(target=task, args=(r, world, folder)) for r in range(world)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(_LIMIT_S)
    hanging = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in hanging:
        ranks[rank].kill()
    assert not hanging, f"ranks {hanging} hang"
    return [torch.load(f"{folder}/{rank}.pt") for rank in range(world)], [process.exitcode for process in ranks]


@pytest.mark.parametrize("world", [2, 4])
def test_ranks(world, tmp_path):
    # One test for all cases: under xdist every worker that gets one of several would start the ranks anew.
    found, codes = outcome_of(parallel_worker.run, world, str(tmp_path))
    assert codes == [0] * (world - 1) + [7], "the last rank ends by itself, and nobody else"
    names = parallel_worker.names()
    for rank, words in enumerate(found):
        reached = names[:-1] if rank == world - 1 else names
        failed = {name: words.get(name, "was not reached") for name in reached}
        assert not any(failed.values()), f"rank {rank}: " + "\n".join(f"{n}: {w}" for n, w in failed.items() if w)


def test_every_rank_names_a_mismatch_though_the_first_ends_at_once(tmp_path):
    found, codes = outcome_of(parallel_worker.mismatch_and_end, 3, str(tmp_path))
    assert [words["mismatch"] for words in found] == [""] * 3 and codes == [0] * 3


def test_a_table_that_graphs_read_is_not_made_anew():
    device = torch.device("cpu")
    first = Placement(8, 2).key_table(device)
    for experts in range(9, 60):
        Placement(experts, 2).key_table(device)
    assert Placement(8, 2).key_table(device) is first


def test_every_expert_has_one_place():
    for experts, world, chunks in ((8, 2, 1), (9, 4, 2), (130, 8, 4), (5, 5, 1), (10, 8, 2)):
        placement = Placement(experts, world, chunks)
        held = [placement.experts(rank) for rank in range(world)]
        assert [e for part in held for e in part] == list(range(experts))
        assert [len(part) for part in held if part] == [len(c) for c in torch.arange(experts).chunk(world)]
        for rank, part in enumerate(held):
            bounds = placement.chunk_bounds(rank)
            for chunk in range(chunks):
                keys = placement.key_of[part.start + bounds[chunk] : part.start + bounds[chunk + 1]]
                assert set(keys) <= {chunk * world + rank} and (keys or len(part) < chunks)
        assert placement.key_of[experts] == chunks * world
