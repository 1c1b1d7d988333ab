"""The state of experts that lie on several ranks, as checkpoints want it: DTensors.

A rank's parameters are plain tensors of its own experts, and have the same names on all ranks. In a state dict each is
a DTensor of all experts, Shard(0) over the expert group: torch.distributed.checkpoint then keeps every expert, once,
and loads them on another number of ranks. So are the tensors that an optimizer keeps for these parameters.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from expertile.moe._members import group_device

_HOW = "use torch.distributed.checkpoint, which shares out experts anew, where torch.save keeps one rank's"


@dataclass(frozen=True)
class ExpertState:
    """Where the E experts of a layer lie: `experts` on this rank of `group`. mesh: the group's, if it was given as one.

    A part is this rank's, [E_local, …]: a plain tensor, or fully_shard's DTensor over ranks with the same experts.
    """

    num_experts: int
    experts: range
    group: dist.ProcessGroup
    mesh: DeviceMesh | None

    def __deepcopy__(self, memo: Any) -> "ExpertState":
        return self  # copies of a layer share its group

    def whole(self, part: torch.Tensor) -> DTensor:
        """[E, …] with this rank's part, whose memory it shares."""
        mesh = self._mesh(part.device.type)
        placements: list[Placement] = [Shard(0)]
        local = part
        if isinstance(part, DTensor):  # experts first cut over their group, then over the ranks that have them alike
            mesh = DeviceMesh._concatenate([part.device_mesh, mesh])
            ranks = self.group.size()
            strided = _StridedShard(0, split_factor=ranks) if ranks > 1 else Shard(0)
            placements = [*(strided if p.is_shard(0) else p for p in part.placements), *placements]
            local = part.to_local()
        shape = torch.Size((self.num_experts, *part.shape[1:]))
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=part.stride())

    def part(self, whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """This rank's part of [E, …], plain or as `whole` makes it, distributed as the part `like` is. Of a DTensor
        that lies otherwise all ranks must ask. ValueError for a DTensor of other processes' that was unpickled here."""
        if isinstance(whole, DTensor):
            shape = (len(self.experts), *whole.shape[1:])
            meant = self.whole(like)
            same_ranks = torch.equal(whole.device_mesh.mesh, meant.device_mesh.mesh)  # on any kind of device
            if same_ranks and whole.placements == meant.placements:
                saved_at, here = (t.device_mesh.get_coordinate() for t in (whole, meant))
                if saved_at != here:
                    raise ValueError(f"state_dict: expected that of rank {here} of the mesh, got {saved_at}'s; {_HOW}")
                if not isinstance(like, DTensor):
                    return whole.to_local()
                return DTensor.from_local(
                    whole.to_local(),
                    like.device_mesh,
                    like.placements,
                    run_check=False,
                    shape=torch.Size(shape),
                    stride=whole.stride(),
                )
            mesh = whole.device_mesh
            try:
                whole = whole.full_tensor()
            except RuntimeError as error:
                raise ValueError(f"state_dict: expected experts on ranks that are here, got {mesh}; {_HOW}") from error
        mine = whole[self.experts.start : self.experts.stop]
        if not isinstance(like, DTensor):
            return mine
        return distribute_tensor(mine, like.device_mesh, like.placements, src_data_rank=None)

    def _mesh(self, device: str) -> DeviceMesh:
        # A mesh of another kind of device would have DTensor copy the part.
        device = group_device(self.group).type if device == "meta" else device
        return self.mesh if self.mesh is not None and device == self.mesh.device_type else _mesh_of(self.group, device)


@cache
def _mesh_of(group: dist.ProcessGroup, device: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device)


# Layers with `expert_state` and `expert_parameters()`; and the optimizers that know of them.
_layers: WeakSet[Any] = WeakSet()
_optimizers: WeakSet[Optimizer] = WeakSet()


def follow(layer: Any) -> None:
    """From now on every optimizer's state dict has the tensors of this layer's experts as the layer's state dict has.

    Who makes the optimizer is not known here. But nothing is in its state before its first step, and before that a hook
    of torch's for all optimizers is called.
    """
    _layers.add(layer)
    _hook_steps()


@cache
def _hook_steps() -> None:
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _optimizers:
        return
    _optimizers.add(optimizer)
    optimizer.register_state_dict_post_hook(_saved)
    optimizer.register_load_state_dict_pre_hook(_loaded)
    for state, parameter in _experts_of(optimizer):  # loaded before there was a hook
        kept = optimizer.state.get(parameter, {})
        kept.update({n: state.part(t, parameter) for n, t in kept.items() if isinstance(t, DTensor)})


def _experts_of(optimizer: Optimizer) -> Iterator[tuple[ExpertState, torch.Tensor]]:
    held = _held()
    return ((held[id(p)], p) for group in optimizer.param_groups for p in group["params"] if id(p) in held)


def _held() -> dict[int, ExpertState]:
    return {id(p): layer.expert_state for layer in _layers for p in layer.expert_parameters()}


def _saved(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook of `Optimizer.state_dict`."""
    return _changed(optimizer, state_dict, lambda state, p, t: state.whole(t) if t.shape[0] == p.shape[0] else t)


def _loaded(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A hook of `Optimizer.load_state_dict`."""
    return _changed(
        optimizer, state_dict, lambda state, p, t: state.part(t, p) if t.shape[0] == state.num_experts else t
    )


_Change = Callable[[ExpertState, torch.Tensor, torch.Tensor], torch.Tensor]


def _changed(optimizer: Optimizer, state_dict: dict[str, Any], change: _Change) -> dict[str, Any]:
    """`state_dict` with what belongs to experts changed: every tensor that has them as its first dimension."""
    held, state = _held(), dict(state_dict["state"])
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    for key, parameter in zip(keys, parameters, strict=False):  # other groups than the optimizer's are its to refuse
        if key in state and id(parameter) in held:
            state[key] = {
                name: change(held[id(parameter)], parameter, t) if isinstance(t, torch.Tensor) and t.dim() else t
                for name, t in state[key].items()
            }
    return {**state_dict, "state": state}
