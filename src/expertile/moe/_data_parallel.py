"""Experts beside data parallelism, which takes what has one name on all ranks for copies of one thing.

The experts that the ranks of an expert group hold are different: DistributedDataParallel must leave them out, and
fully_shard may cut them among ranks with the same experts only.
"""

import inspect
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from expertile.moe._members import Members
from expertile.ops.torch_op import once_differentiable


class Averaged(torch.autograd.Function):
    """A tensor as it is; its gradient is averaged over the ranks of `members`, which have the same tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, members: Members) -> torch.Tensor:  # type: ignore[override]
        ctx.members = members
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        members = ctx.members
        mean = grad.contiguous() / members.world
        with members.named("averaging the gradients of experts"):
            members.wait(dist.all_reduce(mean, group=members.group, async_op=True), mean.is_cuda)
        return mean, None


def check_sharding(name: str, parameter: object, members: Members) -> None:
    """ValueError for a DTensor over several ranks of the expert group `members`, whose experts would be mixed."""
    if not isinstance(parameter, DTensor):
        return
    shared = sorted(set(parameter.device_mesh.mesh.flatten().tolist()) & set(members.ranks))
    if len(shared) > 1:
        raise ValueError(
            f"{name}: expected fully_shard's mesh to have one rank of the expert group {list(members.ranks)}, got "
            f"{shared}, which hold different experts; pass ignored_params=set(layer.expert_parameters()), or for them "
            "a mesh of ranks with the same experts"
        )


@cache
def guard_ddp(kind: type[nn.Module]) -> None:
    """Have DistributedDataParallel leave out the experts of every layer of this kind (an ExpertParallelMoE).

    It broadcasts rank 0's parameters and averages gradients, but for those that the OUTERMOST module names in
    `_ddp_params_and_buffers_to_ignore`. A layer inside a model knows neither that module nor its own name there; only
    the constructor does, and so it is told here.
    """
    init = DistributedDataParallel.__init__
    signature = inspect.signature(init)

    @wraps(init)
    def with_experts(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        mesh, group = given.get("device_mesh"), given.get("process_group")
        group = group or (mesh.get_group() if mesh is not None else dist.group.WORLD)
        if group is not None:
            _leave_out(given["module"], set(dist.get_process_group_ranks(group)), kind)
        init(self, *args, **kwargs)

    DistributedDataParallel.__init__ = with_experts  # type: ignore[method-assign]


def _leave_out(model: nn.Module, ranks: set[int], kind: type[nn.Module]) -> None:
    """Mark experts of `model` that are not the same on all `ranks`.

    ValueError if the gradients of parameters that some ranks share are not averaged.
    """
    names = []
    for prefix, layer in model.named_modules():
        if not isinstance(layer, kind):
            continue
        group: Members = layer.parallel.members  # type: ignore[assignment, union-attr]
        held = set(group.ranks)
        if len(ranks & held) == 1:  # the same on all ranks: theirs to average
            continue
        if ranks - held and layer.replicas is None:
            raise ValueError(
                f"module: expected `replicas` for the experts of {prefix or type(layer).__name__}, as ranks "
                f"{sorted(ranks - held)} are not of their expert group {sorted(held)} and hold them too, got None: "
                "DistributedDataParallel can not average them over part of its ranks"
            )
        mine = {id(p) for p in layer.expert_parameters()}  # type: ignore[operator]
        own = [name for name, p in layer.named_parameters(recurse=False) if id(p) in mine]
        # DDP also writes a parameter of the outermost module with a dot before it.
        names += [f"{prefix}.{n}" for n in own] + ([] if prefix else own)
    if names:
        names += getattr(model, "_ddp_params_and_buffers_to_ignore", [])
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(set(names)))
