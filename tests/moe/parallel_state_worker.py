"""What one rank does in test_parallel_state: checkpoints of a layer whose experts lie on several ranks, and the layer
beside data parallelism."""

import copy
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.nn.utils.parametrizations import weight_norm

from expertile.moe.layer import MoE
from expertile.moe.parallel_layer import ExpertParallelMoE
from tests.moe.parallel_worker import close, raises

TIMEOUT_S = 20.0
EXPERTS = 9  # of 2 ranks 5 and 4, of 4 ranks 3, 3, 3 and none
_OF_EXPERTS = ("gate_up", "down", "gate_up_bias", "down_bias")


def whole_layer(seed: int, experts: int = EXPERTS, **options: object) -> MoE:
    torch.manual_seed(seed)
    return MoE(16, 8, experts, 2, bias=True, score="sigmoid", **options)


class Model(nn.Module):
    """A layer among others, as it stands in a model."""

    def __init__(self, moe: nn.Module):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(16, 16)
        self.block = nn.ModuleDict({"moe": moe})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.block["moe"](self.first(x))


def inputs(world: int, rank: int) -> torch.Tensor:
    return torch.randn(world, 7, 16, generator=torch.Generator().manual_seed(11))[rank]


def trained(rank: int, world: int, seed: int = 5, steps: int = 2) -> tuple[Model, torch.optim.Optimizer]:
    model = Model(ExpertParallelMoE(whole_layer(seed)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        model(inputs(world, rank)).square().mean().backward()
        for name, p in model.named_parameters():
            if name.rpartition(".")[2] not in _OF_EXPERTS:
                dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def truth(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Every parameter and all that the optimizer keeps of it, whole; experts put together without the layer's help."""
    found, group = {}, model.block["moe"].parallel.group
    for name, p in model.named_parameters():
        for key, t in {"value": p.detach(), **optimizer.state[p]}.items():
            t = t.full_tensor() if isinstance(t, DTensor) else t  # by fully_shard
            if t.dim() and name.rpartition(".")[2] in _OF_EXPERTS:
                parts: list[torch.Tensor] = [None] * group.size()  # type: ignore[list-item]
                dist.all_gather_object(parts, t, group=group)
                t = torch.cat(parts)
                assert t.shape[0] == EXPERTS
            found[f"{name}.{key}"] = t.clone()
    return found


def same(model: Model, optimizer: torch.optim.Optimizer, expected: dict[str, torch.Tensor]) -> None:
    got = truth(model, optimizer)
    assert got.keys() == expected.keys()
    for name, t in expected.items():
        assert torch.equal(got[name], t), name


def save(rank: int, world: int, folder: Path) -> None:
    model, optimizer = trained(rank, world)
    held = model.block["moe"].state_dict()
    assert isinstance(held["down"], DTensor) and held["down"].shape == (EXPERTS, 16, 8)
    assert not isinstance(held["router"], DTensor)
    expected = truth(model, optimizer)
    for name, t in get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)).items():
        assert rank or torch.equal(t, expected.get(f"{name}.value", t)), name
    weights, kept = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": kept}, checkpoint_id=folder / f"of-{world}")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / f"plain-of-{world}")
    if rank == 0:
        torch.save(expected, folder / f"truth-of-{world}.pt")


def load(rank: int, world: int, folder: Path, saved_by: int | str) -> None:
    expected = torch.load(folder / f"truth-of-{saved_by}.pt")
    model, optimizer = trained(rank, world, seed=6, steps=0)
    weights, kept = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": kept}, checkpoint_id=folder / f"of-{saved_by}")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=kept)
    same(model, optimizer, expected)
    if saved_by == "sharded":
        return
    if world == 4:
        stale = torch.load(folder / "0-of-2.pt")
        raises(
            ValueError,
            "expected experts on ranks that are here, got DeviceMesh((2,)",
            lambda: model.block["moe"].load_state_dict(stale),
        )
    # As many do it: the module's own state dict, filled in place.
    other = Model(ExpertParallelMoE(whole_layer(7)))
    state = {"model": other.state_dict()}
    for t in state["model"].values():
        t.zero_()
    dcp.load(state, checkpoint_id=folder / f"plain-of-{saved_by}")
    other.load_state_dict(state["model"])
    for (name, p), q in zip(other.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p, q), name


def load_otherwise(rank: int, world: int, folder: Path) -> None:
    """Whole tensors from rank 0, the optimizer's own state dict, plain tensors, copies."""
    model, optimizer = trained(rank, world)
    expected = truth(model, optimizer)
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, kept = get_model_state_dict(model, options=full), get_optimizer_state_dict(model, optimizer, options=full)
    other, fresh = trained(rank, world, seed=6, steps=1)
    spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, weights, options=spread)
    set_optimizer_state_dict(other, fresh, kept, options=spread)
    same(other, fresh, expected)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    kept = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=flat))
    other, fresh = trained(rank, world, seed=6, steps=1)
    set_state_dict(other, fresh, model_state_dict=model.state_dict(), optim_state_dict=kept, options=flat)
    same(other, fresh, expected)
    # An optimizer that has not made a step, and one that has.
    for steps in (0, 1):
        other, fresh = trained(rank, world, seed=6, steps=steps)
        other.load_state_dict(model.state_dict())
        fresh.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch takes tensors over as they are
        twin, twins = trained(rank, world)
        for m, o in ((other, fresh), (twin, twins)):
            for p in m.parameters():
                p.grad = torch.ones_like(p)
            o.step()
        same(other, fresh, truth(twin, twins))
    moe = model.block["moe"]
    mine = {name: p.detach().clone() for name, p in moe.named_parameters()} | dict(moe.named_buffers())
    other.block["moe"].load_state_dict(mine)
    assert all(torch.equal(p, mine[name]) for name, p in other.block["moe"].named_parameters())
    if world == 2:
        mine["gate_up"] = mine["gate_up"][1:]
        raises(RuntimeError, "size mismatch for gate_up", lambda: other.block["moe"].load_state_dict(mine))
    torch.save(moe.state_dict(), folder / f"{rank}-of-{world}.pt")
    dist.barrier()
    other.block["moe"].load_state_dict(torch.load(folder / f"{rank}-of-{world}.pt"))
    wrong = torch.load(folder / f"{(rank + 1) % world}-of-{world}.pt")
    raises(ValueError, "state_dict: expected that of rank", lambda: moe.load_state_dict(wrong))
    x = inputs(world, rank)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x)) and twin.block["moe"].gate_up is not moe.gate_up
    assert isinstance(twin.state_dict()["block.moe.gate_up"], DTensor)
    other = Model(ExpertParallelMoE(whole_layer(7, device="meta")))
    assert other.state_dict()["block.moe.down"].is_meta
    other.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(other(x), model(x))
    other = Model(ExpertParallelMoE(whole_layer(7, device="meta"))).to_empty(device="cpu")
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))
    assert torch.equal(model.bfloat16()(x.bfloat16()), other.to(torch.bfloat16)(x.bfloat16()))


def reference(world: int, ranks_of_a_group: int) -> dict[str, torch.Tensor]:
    """Gradients of the mean over ranks of each rank's loss, by one process; those of experts times the ranks of an
    expert group, over which they are sums."""
    model = Model(whole_layer(5))
    torch.stack([model(inputs(world, r)).square().mean() for r in range(world)]).mean().backward()
    scale = {name: ranks_of_a_group if name in _OF_EXPERTS else 1 for name in (*_OF_EXPERTS, "")}
    return {name: p.grad * scale.get(name.rpartition(".")[2], 1) for name, p in model.named_parameters()}


def right_gradients(model: nn.Module, layer: ExpertParallelMoE, rank: int, world: int) -> None:
    model(inputs(world, rank)).square().mean().backward()
    model = getattr(model, "module", model)
    for name, expected in reference(world, layer.parallel.world).items():
        got = model.get_parameter(name).grad
        got = got.full_tensor() if isinstance(got, DTensor) else got
        expected = layer.parallel.shard(expected) if name.rpartition(".")[2] in _OF_EXPERTS else expected
        close(f"gradient of {name}", got, expected.double(), torch.float32)


def ddp(rank: int, world: int, folder: Path) -> None:
    """DistributedDataParallel leaves experts as they are, around the layer and around a model with it."""
    for around in (Model, nn.Identity):
        layer = ExpertParallelMoE(whole_layer(5))
        model = Model(layer) if around is Model else layer
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            layer.router.add_(rank)
        wrapped = DistributedDataParallel(model)
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name]), f"{name}: experts as they were, all else as on rank 0"
        if around is Model:
            right_gradients(wrapped, layer, rank, world)
            clipped(model, layer, rank, world)
        else:
            wrapped(inputs(world, rank)).sum().backward()
            alone = ExpertParallelMoE(whole_layer(5))
            alone(inputs(world, rank)).sum().backward()
            for p, q in zip(layer.expert_parameters(), alone.expert_parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)


def clipped(model: nn.Module, layer: ExpertParallelMoE, rank: int, world: int) -> None:
    """The recipe of docs/guide/several-gpus.md: one norm of all gradients, alike on all ranks."""
    experts = set(layer.expert_parameters())
    for p in experts:
        p.grad.div_(layer.parallel.world)
    squares = get_total_norm([p.grad for p in experts]).square()
    dist.all_reduce(squares, group=layer.parallel.group)
    rest = get_total_norm([p.grad for p in model.parameters() if p not in experts])
    norm = (squares + rest.square()).sqrt()
    clip_grads_with_norm_(model.parameters(), 1.0, norm)
    expected = torch.stack([g.norm() for g in reference(world, 1).values()]).norm()
    torch.testing.assert_close(norm, expected)


def fsdp_over_the_group(rank: int, world: int, folder: Path) -> None:
    layer = ExpertParallelMoE(whole_layer(5))
    message = "expected fully_shard's mesh to have one rank of the expert group [0, 1], got [0, 1]"
    raises(ValueError, message, lambda: fully_shard(layer))
    model = Model(ExpertParallelMoE(whole_layer(5)))
    raises(ValueError, message, lambda: fully_shard(model))
    raises(
        ValueError,
        "down: expected to stay a parameter of the layer",
        lambda: weight_norm(ExpertParallelMoE(whole_layer(5)), "down"),
    )
    raises(ValueError, "quantize_experts: expected a layer on one GPU", lambda: layer.quantize_experts("int4"))
    layer = ExpertParallelMoE(whole_layer(5))
    model = fully_shard(Model(layer), ignored_params=set(layer.expert_parameters()))
    right_gradients(model, layer, rank, world)


def save_and_fill(model: Model, optimizer: torch.optim.Optimizer, folder: Path, name: str) -> dict[str, torch.Tensor]:
    """A checkpoint, read back after all has been set to zero; what it is to hold."""
    weights, kept = get_state_dict(model, optimizer)
    expected = truth(model, optimizer)
    dcp.save({"model": weights, "optimizer": kept}, checkpoint_id=folder / name)
    for t in (*weights.values(), *(t for s in kept["state"].values() for t in s.values())):
        t.zero_()
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=kept)
    assert not any(t.any() for t in truth(model, optimizer).values())
    dcp.load({"model": weights, "optimizer": kept}, checkpoint_id=folder / name)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=kept)
    same(model, optimizer, expected)
    return expected


def experts_and_data(rank: int, world: int, folder: Path) -> None:
    """Two expert groups of two ranks: by DDP over all ranks with replicas; by DDP over those alone."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    layer = ExpertParallelMoE(whole_layer(5), mesh["experts"], replicas=mesh["data"])
    model = Model(layer)
    optimizer = torch.optim.AdamW(model.parameters())
    right_gradients(DistributedDataParallel(model), layer, rank, world)
    optimizer.step()
    save_and_fill(model, optimizer, folder, "of-data")
    alone = ExpertParallelMoE(whole_layer(5), mesh["experts"])
    raises(
        ValueError,
        "module: expected `replicas` for the experts of block.moe, as ranks",
        lambda: DistributedDataParallel(Model(alone)),
    )
    raises(
        ValueError,
        "experts is range(5, 9) on rank",
        lambda: ExpertParallelMoE(whole_layer(5), mesh["experts"], replicas=mesh["experts"]),
    )
    model = DistributedDataParallel(Model(alone), process_group=mesh["data"].get_group())
    model(inputs(world, rank)).square().mean().backward()
    for p, q in zip(alone.expert_parameters(), layer.expert_parameters(), strict=True):
        close("gradient of experts", p.grad, q.grad.double(), torch.float32)


def experts_and_fsdp(rank: int, world: int, folder: Path) -> None:
    """Two expert groups of two ranks, all else sharded over all four: experts as they are with replicas; experts
    sharded over the two ranks that have them alike, with a checkpoint."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "experts"))
    layer = ExpertParallelMoE(whole_layer(5), mesh["experts"], replicas=mesh["data"])
    right_gradients(fully_shard(Model(layer), ignored_params=set(layer.expert_parameters())), layer, rank, world)

    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    layer = ExpertParallelMoE(whole_layer(5), mesh["experts"])
    model, experts = Model(layer), set(layer.expert_parameters())
    there = ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh["data"], shard_mesh_dim=0))
    fully_shard(model, shard_placement_fn=lambda p: there if p in experts else None)
    optimizer = torch.optim.AdamW(model.parameters())
    right_gradients(model, layer, rank, world)
    optimizer.step()
    expected = save_and_fill(model, optimizer, folder, "of-sharded")
    if rank == 0:
        torch.save(expected, folder / "truth-of-sharded.pt")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert rank or all(torch.equal(t, expected[f"{name}.value"]) for name, t in whole.items() if "bias" not in name)
    layer.load_state_dict(whole_layer(6).state_dict() | {"router": layer.router})
    assert torch.equal(truth(model, optimizer)["block.moe.down.value"], whole_layer(6).down)


SAVED = {"save": save, "load_otherwise": load_otherwise}
ALONGSIDE = {
    2: {"ddp": ddp, "fsdp_over_the_group": fsdp_over_the_group},
    4: {"experts_and_data": experts_and_data, "experts_and_fsdp": experts_and_fsdp},
}


def loads(*saved_by: int | str) -> dict[str, Callable[[int, int, Path], None]]:
    return {f"load what {w} saved": partial(load, saved_by=w) for w in saved_by}


def run(
    rank: int, world: int, folder: str, todo: dict[str, Callable[[int, int, Path], None]], checkpoints: Path
) -> None:
    """The process of one rank: everything in turn; what went wrong in each goes to the folder."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    found = {}
    for name, check in todo.items():
        try:
            check(rank, world, checkpoints)
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        torch.save(found, Path(folder) / f"{rank}.pt")
    os._exit(0)
