"""Checkpoints of a layer with experts on 1, 2 and 4 ranks, and the layer beside DDP and FSDP2, on gloo."""

from functools import partial

import pytest

from tests.moe import parallel_state_worker as worker
from tests.moe.test_parallel import outcome_of


def run(world, todo, folder, checkpoints):
    folder.mkdir()
    found, codes = outcome_of(partial(worker.run, todo=todo, checkpoints=checkpoints), world, str(folder))
    assert codes == [0] * world
    for rank, words in enumerate(found):
        wrong = {name: words.get(name, "was not reached") for name in todo if words.get(name) != ""}
        assert not wrong, f"rank {rank} of {world}: " + "\n".join(f"{n}: {w}" for n, w in wrong.items())


def test_checkpoints_are_resharded(tmp_path):
    # One test: each stage reads what an earlier one wrote.
    run(2, worker.SAVED, tmp_path / "a", tmp_path)
    run(4, worker.loads(2) | worker.SAVED, tmp_path / "b", tmp_path)
    run(2, worker.loads(4), tmp_path / "c", tmp_path)
    run(1, worker.loads(2, 4), tmp_path / "d", tmp_path)


@pytest.mark.parametrize("world", [2, 4])
def test_beside_data_parallelism(world, tmp_path):
    run(world, worker.ALONGSIDE[world], tmp_path / "a", tmp_path)
    if world == 4:
        run(2, worker.loads("sharded"), tmp_path / "b", tmp_path)
