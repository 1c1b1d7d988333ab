"""Expert parallelism: the experts of a layer divided among the ranks of a process group.

Every rank routes its own tokens to global expert ids. Their rows travel to the ranks that hold those experts. The
experts' products run there, with the kernels of a single GPU, and the results travel back:

    counts      [2, chunks, W] int32 to every rank; the host reads them             exact mode only
    labels      a row's k ids and weights, 8 k bytes                                in chunks, as the rows
    dispatch    x, H elements a row; a token goes to a rank once                    ≤ min(W, k) rows a token
    experts     gathered up-projection with activation, down-projection             one chunk of experts at a time
    combine     "ordered": one row for each slot comes back                         k rows a token
                "partial": each rank sums its experts' rows of a token first        ≤ min(W, k) rows a token
    sum         out[t] = Σ_j w[t, j] y[t, j] in the order of j; or Σ over ranks of their sums

All chunks' dispatches are queued at once, and a chunk's results start back while the next chunk's products run. The
order of sums in "ordered" is that of one GPU; "partial" rounds each rank's sum to x's dtype.

The backward pass sends dy as x was sent, and sums dx over a rank's experts before it returns: ≤ min(W, k) rows a token
each. It computes the weights' gradients while dx travels. What is kept: the rows received, the pre-activation, the
plan. A weight's gradient is complete on the rank that holds it: do not all-reduce it over the group.
"""

from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from expertile.formats.quantized import changed
from expertile.moe._members import Members
from expertile.moe._parallel_mlp import parallel_mlp
from expertile.moe._placement import Placement
from expertile.moe.exchange import Exchange
from expertile.moe.expert_weights import Experts, Weight, autocasts
from expertile.moe.permute import check_ids
from expertile.ops.checks import check_integer, require_tensors

_ORDERS = ("ordered", "partial")


@dataclass(frozen=True)
class ParallelConfig:
    """What every rank of the group must have alike.

    Attributes:
        num_experts: at least the world size, and need not be a multiple of it: ranks hold ⌈num_experts / world⌉, the
            last ones fewer or none.
        top_k: columns of topk_ids.
        hidden_size: H of the layer.
        dtype: of the activations; autocast, and weights of another dtype, take precedence.
        chunks: into how many runs each rank's experts are cut, so that the results of one travel while the next is
            computed; 1 to ⌈num_experts / world⌉.
        combine: "ordered" (one row for each slot comes back; the bits of one GPU) or "partial" (one for each token and
            rank, a sum rounded to dtype).
        max_tokens: None: buffers as long as what they hold, and one wait for the GPU a step. Otherwise the most tokens
            of a rank in a step: buffers of fixed size, nothing waits for the GPU, and CUDA graphs can be captured.
            chunks is 1.
        capacity: with max_tokens, the slots from one rank to another that a buffer has room for; by default all that
            can be, max_tokens · min(top_k, experts of a rank). What does not fit makes its token NaN and is counted.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    dtype: torch.dtype = torch.bfloat16
    chunks: int = 1
    combine: str = "ordered"
    max_tokens: int | None = None
    capacity: int | None = None

    def check(self, world: int) -> None:
        """ValueError naming the first field that cannot be for `world` ranks."""
        optional = [name for name in ("max_tokens", "capacity") if getattr(self, name) is not None]
        for name in ("num_experts", "top_k", "hidden_size", "chunks", *optional):
            check_integer(name, getattr(self, name), 1)
        if self.num_experts < world:
            raise ValueError(
                f"num_experts: expected at least {world}, as many as there are ranks, got {self.num_experts}"
            )
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k: expected at most num_experts ({self.num_experts}), got {self.top_k}")
        most = Placement(self.num_experts, world).most
        if self.chunks > most:
            raise ValueError(f"chunks: expected at most {most}, the experts of a rank, got {self.chunks}")
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise ValueError(f"dtype: expected a floating-point dtype, got {self.dtype!r}")
        if self.combine not in _ORDERS:
            raise ValueError(f"combine: expected one of {_ORDERS}, got {self.combine!r}")
        if self.max_tokens is None and self.capacity is not None:
            raise ValueError(f"capacity: expected None without max_tokens, got {self.capacity}")
        if self.max_tokens is not None and self.chunks != 1:
            raise ValueError(f"chunks: expected 1 with max_tokens, whose buffers are not cut, got {self.chunks}")

    def slots_per_pair(self, world: int) -> int | None:
        """Rows of a return buffer from one rank to another; None: as many as there are."""
        if self.max_tokens is None:
            return None
        most = self.max_tokens * min(self.top_k, Placement(self.num_experts, world).most)
        return most if self.capacity is None else min(self.capacity, most)


class ExpertParallel:
    """The experts of one layer across the ranks of `group`.

    Args:
        config: alike on every rank, which is checked here.
        group: a ProcessGroup or one-dimensional DeviceMesh; the default group if None. NCCL for tensors on GPUs, gloo
            on CPUs. Its members must all make this object, in the same order as others of its kind.
        timeout: of every wait for another rank; the group's own by default. Errors come before it.
        settings: more that must be alike on every rank (the activation, say), compared by its text.

    Attributes:
        experts: range of the global ids of the experts that this rank holds; empty on the last ranks where ⌈num_experts
            / world⌉ on each of the others are all.
        rank: this rank in the group.
        world: how many there are.

    Raises:
        ValueError: on every rank, naming the settings and ranks that differ; or a config that cannot be.
        RuntimeError: naming the ranks that did not come.
    """

    def __init__(
        self,
        config: ParallelConfig,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        timeout: timedelta | None = None,
        settings: dict[str, Any] | None = None,
    ):
        if not isinstance(config, ParallelConfig):
            raise ValueError(f"config: expected a ParallelConfig, got {type(config).__name__}")
        self.config = config
        self.group = process_group(group)
        self.members = Members(self.group, timeout)
        self.rank, self.world = self.members.rank, self.members.world
        self.members.agree({**asdict(config), **(settings or {})})
        config.check(self.world)
        placement = Placement(config.num_experts, self.world, config.chunks)
        self.experts = placement.experts(self.rank)
        self._exchange = Exchange(self.members, placement, config.slots_per_pair(self.world), config.max_tokens)

    def __deepcopy__(self, memo: Any) -> "ExpertParallel":
        return self  # copies of a layer share its connections

    @property
    def overflow(self) -> torch.Tensor | None:
        """[1] int64 on the device of the last call: how many of this rank's slots found no room since this object was
        made. None before the first call, and without max_tokens."""
        return self._exchange.overflow

    def shard(self, weight: Any) -> Any:
        """This rank's part, views, of a tensor or quantised weight with all experts as its first dimension."""
        if not isinstance(weight, torch.Tensor):
            return changed(weight, self.shard)
        if weight.dim() < 1 or weight.shape[0] != self.config.num_experts:
            raise ValueError(f"weight: expected {self.config.num_experts} experts first, got {list(weight.shape)}")
        return weight[self.experts.start : self.experts.stop]

    def mlp(
        self,
        x: torch.Tensor,
        gate_up: Weight,
        down: Weight,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        *,
        activation: str = "swiglu",
        interleaved: bool = False,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        check: bool = False,
        batch_invariant: bool = False,
    ) -> torch.Tensor:
        """`moe_mlp` with experts on all ranks: every rank of the group must call it, with its own tokens or with none.

        Args:
            x: [T, H] of the weights' dtype, this rank's tokens; T may differ from rank to rank. With quantised weights
                of the config's. Under autocast all are cast, and the result is of autocast's dtype; on every rank or on
                none.
            gate_up, down: [E_local, 2I, H] and [E_local, H, I], the experts of this rank (`experts`, `shard`);
                quantised ones without gradients.
            topk_ids: [T, k] int32 or int64 global ids; num_experts (or any other id out of range) is a dropped slot.
            topk_weights: [T, k], floating point; used in float32.
            activation, interleaved: as `moe_mlp` has them.
            gate_up_bias, down_bias: [E_local, 2I] and [E_local, H].
            check: also look for ids out of range, which waits for the GPU.
            batch_invariant: as for `moe_mlp`, and whatever the number of ranks: the bits are those of one GPU of the
                kind. With combine "ordered" alone. The gradient of x is summed rank by rank: it has one GPU's bits on
                one rank only, and those of topk_weights always.

        Returns:
            [T, H] in x's dtype. Differentiable in x, topk_weights, the weights and the biases; then every rank must run
            the backward pass too.

        Raises:
            ValueError: naming the argument, what was expected and what came.
            RuntimeError: another rank died or did not come in time, and which.
        """
        if batch_invariant:
            require_ordered(self.config.combine)
        require_tensors({}, x=x)
        experts = Experts(gate_up, down, gate_up_bias, down_bias, activation, interleaved, batch_invariant)
        dtype = gate_up.dtype if isinstance(gate_up, torch.Tensor) else self.config.dtype
        if autocasts(x):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, experts = x.to(dtype), experts.map(lambda t: t.to(dtype))
        if not self.experts:
            experts = Experts.of(map(_with_one, experts.tensors), experts.form)
        self._validate(x, dtype, experts, topk_ids, topk_weights)
        topk_weights = topk_weights.float()
        if check:
            check_ids(topk_ids, self.config.num_experts, values=True)
        tokens = x.shape[0]
        if tokens == 0:  # one token without experts in its place: no product or index meets an empty buffer
            x = torch.cat([x, x.new_zeros(1, x.shape[1])])
            topk_ids = topk_ids.new_full((1, self.config.top_k), self.config.num_experts)
            topk_weights = torch.cat([topk_weights, topk_weights.new_zeros(1, self.config.top_k)])
        out = parallel_mlp(self._exchange, experts, self.config.combine == "ordered", x, topk_ids, topk_weights)
        return out if tokens else out[:0]

    def check(self) -> None:
        """Wait for the GPU, and through it for the other ranks: 3/4 of the timeout at most.

        Raises:
            RuntimeError: naming the ranks that died or did not come; or, with max_tokens, when a slot of this rank
                found no room in a buffer since this object was made.
        """
        device = self._exchange.device
        with self.members.named("waiting for the GPU"):
            if device is not None and device.type == "cuda":
                self.members.synchronize(device)
            lost = 0 if self.overflow is None else int(self.overflow)
        if lost:
            raise RuntimeError(
                f"expert parallel, rank {self.members.name}: {lost} slots found no room in buffers of "
                f"{self.config.slots_per_pair(self.world)} slots from rank to rank (capacity); their tokens are NaN"
            )

    def _validate(
        self, x: torch.Tensor, dtype: torch.dtype, experts: Experts, topk_ids: torch.Tensor, topk_weights: torch.Tensor
    ) -> None:
        c, e = self.config, max(1, len(self.experts))
        check_ids(topk_ids, c.num_experts)
        if x.dim() != 2 or x.shape[1] != c.hidden_size or x.dtype != dtype:
            raise ValueError(f"x: expected [T, {c.hidden_size}] {dtype}, got {list(x.shape)} {x.dtype}")
        if c.max_tokens is not None and x.shape[0] > c.max_tokens:
            raise ValueError(f"x: expected at most max_tokens ({c.max_tokens}) rows, got {x.shape[0]}")
        if topk_ids.shape[1] != c.top_k:
            raise ValueError(f"topk_ids: expected [{x.shape[0]}, {c.top_k}], got {list(topk_ids.shape)}")
        # The rest is what `moe_mlp` requires of these weights and tokens.
        kind = experts.check(x, topk_ids, topk_weights, False)
        if experts.shape[0] != e:
            raise ValueError(f"gate_up: expected the {e} experts of rank {self.members.name}, got {experts.shape[0]}")
        asked = any(t is not None and t.requires_grad for t in (x, topk_weights, *experts.tensors[2:]))
        if kind is not torch.Tensor and torch.is_grad_enabled() and asked:
            raise ValueError(
                "gate_up, down: quantised experts have no backward pass here; expected torch.no_grad(), "
                "got gradients on"
            )


def require_ordered(combine: str) -> None:
    """ValueError where a token's sum depends on the number of ranks."""
    if combine != "ordered":
        raise ValueError(f"batch_invariant: expected combine ordered, as other sums depend on ranks, got {combine!r}")


def _with_one(weight: Any) -> Any:
    """The weight of no experts [0, …] with one of zeros, which gets no rows: no product meets an empty weight."""
    if weight is None:
        return None
    if isinstance(weight, torch.Tensor):
        return torch.cat([weight, weight.new_zeros((1, *weight.shape[1:]))])
    return changed(weight, _with_one)


def process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"group: expected a one-dimensional DeviceMesh (mesh['name'] is one), got {group.ndim}")
        return group.get_group()
    if group is not None:
        return group
    if not dist.is_initialized():
        raise ValueError("group: expected a process group, got None without torch.distributed.init_process_group")
    found = dist.group.WORLD
    assert found is not None
    return found
