"""Adapters of low rank (LoRA, arXiv:2106.09685) for the experts of a layer, over frozen weights of any kind.

For expert e, A_e [r, in] and B_e [out, r], the product with a weight becomes x @ (W_e + scale · B_e A_e)^T. W stays as
it is, in bf16, FP8, INT4 or MXFP4, and no sum of the size of W is formed: R rows in expert order pass small factors.
`_frozen` is the layer that runs with them.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton

from expertile.moe.expert_weights import Experts
from expertile.ops.checks import came
from expertile.ops.low_rank import api as low_rank
from expertile.ops.torch_op import once_differentiable

_T = torch.Tensor


@dataclass(frozen=True)
class Adapter:
    """The adapters of all experts for one weight, as PEFT stores them (`target_parameters`).

    a: [E · r, in], floating point: row e · r + i is row i of A_e (`lora_A.weight`).
    b: [out, r · E], floating point: column i · E + e is column i of B_e (`lora_B.weight`).
    scale: alpha / r, or alpha / √r.
    """

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def check(self, name: str, experts: int, out: int, columns: int, device: torch.device) -> None:
        """ValueError, with the argument's `name`, unless it fits a weight [experts, out, columns] on `device`."""
        a, b = self.a, self.b
        for part, x in (("a", a), ("b", b)):
            right = isinstance(x, torch.Tensor) and x.dim() == 2 and x.is_floating_point() and x.device == device
            if not right:
                expected = f"two dimensions, floating point, on {device}"
                raise ValueError(f"lora.{name}.{part}: expected {expected}, got {came(x)}")
        if a.shape[0] == 0 or a.shape[0] % experts or a.shape[1] != columns:
            raise ValueError(f"lora.{name}.a: expected [{experts} r, {columns}], got {list(a.shape)}")
        if tuple(b.shape) != (out, a.shape[0]):
            raise ValueError(f"lora.{name}.b: expected {[out, a.shape[0]]}, got {list(b.shape)}")

    def delta(self, experts: int, dtype: torch.dtype) -> torch.Tensor:
        """scale · B_e A_e of all experts, [E, out, in] in `dtype`: what the kernels never form."""
        a, b = self._by_expert(experts)
        return self.scale * (b.to(dtype) @ a.to(dtype))

    def factors(self, experts: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(A [E, rank, in], B [E, out, rank]) in `dtype`, contiguous, r filled up with zeros to a rank that the kernels
        take. Differentiable."""
        a, b = self._by_expert(experts)
        r = a.shape[1]
        rank = max(low_rank.LEAST_RANK, triton.next_power_of_2(r))
        a = a.to(dtype) if r == rank else F.pad(a.to(dtype), (0, 0, 0, rank - r))
        if low_rank.on_device(self.b):
            return a.contiguous(), _Turned.apply(self.b, experts, rank, dtype)
        b = b.to(dtype) if r == rank else F.pad(b.to(dtype), (0, rank - r))
        return a.contiguous(), b.contiguous()

    def _by_expert(self, experts: int) -> tuple[torch.Tensor, torch.Tensor]:
        r = self.a.shape[0] // experts
        return self.a.unflatten(0, (experts, r)), self.b.unflatten(1, (r, experts)).permute(2, 0, 1)


@dataclass(frozen=True)
class Lora:
    """Adapters for `moe_mlp`: of gate_up, in H and out 2I with rows in gate_up's order, of down, in I and out H, or of
    both. None: no adapter of that weight."""

    gate_up: Adapter | None = None
    down: Adapter | None = None

    def check(self, experts: Experts, device: torch.device) -> None:
        """ValueError unless there is an adapter, all fit, and the weights under them are frozen."""
        e, two_i, h = experts.shape
        given = {"gate_up": (self.gate_up, two_i, h), "down": (self.down, h, two_i // 2)}
        if self.gate_up is None and self.down is None:
            raise ValueError("lora: expected an adapter for gate_up or down, got none")
        for name, (adapter, out, columns) in given.items():
            if adapter is not None and not isinstance(adapter, Adapter):
                raise ValueError(f"lora.{name}: expected an Adapter or None, got {type(adapter).__name__}")
            if adapter is not None:
                adapter.check(name, e, out, columns, device)
        if experts.batch_invariant:
            raise ValueError("batch_invariant: expected False with lora, whose products have no such form")
        trained = [n for n in given if getattr(getattr(experts, n), "requires_grad", False)]
        if trained and torch.is_grad_enabled():
            raise ValueError(f"{trained[0]}: expected a frozen weight under lora, got one with requires_grad")

    def merged(self, experts: Experts) -> tuple[torch.Tensor, torch.Tensor]:
        """Dense (gate_up, down) with the adapters added, differentiable in them: for float64's formula."""
        e, *_ = experts.shape
        pairs = ((experts.gate_up, self.gate_up), (experts.down, self.down))
        first, second = (w if adapter is None else w + adapter.delta(e, w.dtype) for w, adapter in pairs)
        return first, second


class _Turned(torch.autograd.Function):
    """B as PEFT lays it out, [out, r · E], -> [E, out, rank] in `dtype`, in one pass; and back."""

    @staticmethod
    def forward(ctx: Any, b: _T, experts: int, rank: int, dtype: torch.dtype) -> _T:  # type: ignore[override]
        ctx.like, ctx.experts = b.detach()[:0], experts
        turned = torch.empty((experts, b.shape[0], rank), dtype=dtype, device=b.device)
        low_rank.turn(b.detach().unflatten(1, (-1, experts)).permute(2, 0, 1), turned)
        return turned

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: _T) -> tuple[Any, ...]:  # type: ignore[override]
        out = ctx.like.new_empty((grad.shape[1], ctx.like.shape[1]))
        low_rank.turn(grad, out.unflatten(1, (-1, ctx.experts)).permute(2, 0, 1))
        return out, None, None, None
