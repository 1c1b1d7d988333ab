"""`MoE` with its experts divided among the ranks of a group (`parallel`): parameters, checkpoints and wrappers."""

from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from expertile.moe._data_parallel import Averaged, check_sharding, guard_ddp
from expertile.moe._expert_state import ExpertState, follow
from expertile.moe._members import Members
from expertile.moe.layer import MoE
from expertile.moe.parallel import ExpertParallel, ParallelConfig, process_group, require_ordered
from expertile.moe.router import Routing

_OF_EXPERTS = ("gate_up", "down", "gate_up_bias", "down_bias")


class ExpertParallelMoE(MoE):
    """`MoE` with its experts divided among the ranks of a group; router and shared expert are on every rank.

    Each rank passes its own tokens. The gradients of this rank's experts are sums over the tokens of all ranks of the
    group; those of the router and the shared expert are of its own tokens, to be reduced as in data parallelism.

    Args:
        moe: the whole layer, alike on every rank (same seed, or loaded); this rank's experts are copied, all else is
            taken over. On the meta device nothing is allocated: `to_empty`, then load.
        group, timeout: as for `ExpertParallel`.
        replicas: group or one-dimensional DeviceMesh of the ranks, this one among them, that hold the same experts in
            other expert groups: the experts' gradients are averaged over it. Not for experts that fully_shard reduces.
        chunks, combine, max_tokens, capacity: as for `ParallelConfig`.

    Attributes:
        parallel: ExpertParallel.

    `state_dict` has the experts as DTensors of all experts, Shard(0) over the group, as torch.distributed.checkpoint
    needs them, also to load on another number of ranks; an optimizer's, from its first step on, too. `load_state_dict`
    takes those, plain tensors of the whole layer, or plain tensors of this rank's experts. Under torch.compile, disable
    this module (`torch.compiler.disable`): collectives are not traced.

    DistributedDataParallel leaves the experts out, in a model around the layer too. fully_shard of experts over ranks
    of the group, FullyShardedDataParallel and parametrizations of them are ValueErrors.

    Raises:
        ValueError, RuntimeError: as `ExpertParallel`; ValueError for replicas with other experts.
    """

    def __init__(
        self,
        moe: MoE,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        replicas: dist.ProcessGroup | DeviceMesh | None = None,
        chunks: int = 1,
        combine: str = "ordered",
        max_tokens: int | None = None,
        capacity: int | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        if not isinstance(moe, MoE):
            raise ValueError(f"moe: expected a MoE, got {type(moe).__name__}")
        gate_up = moe.gate_up
        if moe.lora is not None:
            raise ValueError("moe: expected experts without adapters, which expert parallelism does not have")
        if not isinstance(gate_up, torch.Tensor):
            raise ValueError("moe: expected experts that are not quantised; ExpertParallel.mlp takes quantised ones")
        if moe.batch_invariant:
            require_ordered(combine)
        layer = {**asdict(moe.config), **moe._form, "intermediate_size": moe.intermediate_size}
        super().__init__(
            moe.hidden_size,
            bias=moe.gate_up_bias is not None,
            router_bias=moe.router_bias is not None,
            router_dtype=moe.router_dtype,
            shared_intermediate_size=moe.shared_intermediate_size,
            device="meta",
            dtype=gate_up.dtype,
            **layer,
        )
        experts, slots, hidden = self.config.num_experts, self.config.columns, self.hidden_size
        config = ParallelConfig(experts, slots, hidden, gate_up.dtype, chunks, combine, max_tokens, capacity)
        self.parallel = ExpertParallel(config, group, timeout=timeout, settings=layer)
        self.replicas = None if replicas is None else Members(process_group(replicas), timeout)
        if self.replicas is not None:
            self.replicas.agree({"experts": self.parallel.experts})
        for name, parameter in moe.named_parameters(recurse=False):
            if name in _OF_EXPERTS:
                part = self.parallel.shard(parameter.detach()).clone()
                parameter = nn.Parameter(part, requires_grad=parameter.requires_grad)
            setattr(self, name, parameter)
        self.correction_bias = moe.correction_bias
        mesh = group if isinstance(group, DeviceMesh) else None
        self.expert_state = ExpertState(experts, self.parallel.experts, self.parallel.group, mesh)
        follow(self)
        guard_ddp(ExpertParallelMoE)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        follow(self)

    def __setattr__(self, name: str, value: Any) -> None:
        # As it is; but fully_shard, which else writes to the module's dictionary, thus calls register_parameter.
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if name in _OF_EXPERTS and hasattr(self, "parallel"):
            check_sharding(name, param, self.parallel.members)
        super().register_parameter(name, param)

    def __delattr__(self, name: str) -> None:
        if name in _OF_EXPERTS:
            raise ValueError(
                f"{name}: expected to stay a parameter of the layer, else experts of different ranks are taken for one "
                "thing; got its removal by a parametrization or by FullyShardedDataParallel, for which fully_shard or "
                "ignored_states=list(layer.expert_parameters()) would do"
            )
        super().__delattr__(name)

    def add_lora(self, rank: int, **options: Any) -> MoE:
        """ValueError: expert parallelism has no adapters."""
        raise ValueError("add_lora: expected a layer on one GPU, got one whose experts are on the ranks of a group")

    def quantize_experts(self, format: str) -> MoE:
        """ValueError: the layer's experts are parameters; `ExpertParallel.mlp` takes quantised weights."""
        raise ValueError("quantize_experts: expected a layer on one GPU; ExpertParallel.mlp takes quantised weights")

    def expert_parameters(self) -> Iterator[nn.Parameter]:
        """Those of this rank's experts, which no reduction over the group may touch."""
        return (p for name, p in self.named_parameters(recurse=False) if name in _OF_EXPERTS)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for key in (prefix + name for name in _OF_EXPERTS):
            if key in destination:
                destination[key] = self.expert_state.whole(destination[key])

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name in _OF_EXPERTS:
            given, mine = state_dict.get(prefix + name), getattr(self, name)
            if given is not None and mine is not None and given.shape[0] == self.config.num_experts:
                state_dict[prefix + name] = self.expert_state.part(given, mine)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def _experts(self, tokens: torch.Tensor, routing: Routing) -> torch.Tensor:
        weights: list[Any] = [self.gate_up, self.down, self.gate_up_bias, self.down_bias]
        if self.replicas is not None and torch.is_grad_enabled():
            weights = [None if w is None else Averaged.apply(w, self.replicas) for w in weights]
        gate_up, down, gate_up_bias, down_bias = weights
        how: Any = {"gate_up_bias": gate_up_bias, "down_bias": down_bias, **self._form}
        return self.parallel.mlp(tokens, gate_up, down, routing.topk_ids, routing.topk_weights, **how)

    def extra_repr(self) -> str:
        held, c = self.parallel.experts, self.parallel.config
        of = f"experts {held.start} … {held.stop - 1}" if held else "no experts"
        fixed = "" if c.max_tokens is None else f", max_tokens={c.max_tokens}, capacity={c.capacity}"
        return (
            f"{super().extra_repr()}, {of} on rank {self.parallel.rank} of {self.parallel.world}, "
            f"chunks={c.chunks}, combine={c.combine}{fixed}"
        )
