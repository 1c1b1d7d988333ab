"""Experts: the weights of the expert MLPs and how they are applied, as one value; and what must hold of operands."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_args

import torch

from expertile.formats.fp8 import Fp8Blocks
from expertile.formats.weight_only import WEIGHTS, AnyQuantizedWeight, WeightBeside16Bits
from expertile.moe.permute import check_ids
from expertile.ops.checks import came, check_flags
from expertile.ops.gathered_mm.problem import ACTIVATIONS
from expertile.ops.launch.device import FORMULA_DTYPES

_Maybe = torch.Tensor | None
Weight = torch.Tensor | Fp8Blocks | AnyQuantizedWeight
KINDS: tuple[type, ...] = (torch.Tensor, Fp8Blocks, *WEIGHTS.values())


@dataclass(frozen=True)
class Experts:
    """The experts as `moe_mlp` takes them: gate_up [E, 2I, H], down [E, H, I], biases [E, 2I] and [E, H] or None."""

    gate_up: Any
    down: Any
    gate_up_bias: _Maybe
    down_bias: _Maybe
    activation: str
    interleaved: bool
    batch_invariant: bool = False

    @property
    def form(self) -> tuple[str, bool, bool]:
        """What is no tensor."""
        return self.activation, self.interleaved, self.batch_invariant

    @property
    def tensors(self) -> tuple[Any, Any, _Maybe, _Maybe]:
        """gate_up, down and their biases."""
        return self.gate_up, self.down, self.gate_up_bias, self.down_bias

    @property
    def shape(self) -> tuple[int, int, int]:
        """E, 2I and H."""
        return shape_of(self.gate_up)  # type: ignore[return-value]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Experts":
        """The same with `change` made to each tensor; quantised weights stay as they are."""
        return Experts.of([change(t) if isinstance(t, torch.Tensor) else t for t in self.tensors], self.form)

    @staticmethod
    def of(tensors: Iterable[Any], form: tuple[str, bool, bool] | tuple[str, bool]) -> "Experts":
        """The value with these `tensors` and this `form`."""
        gate_up, down, gate_up_bias, down_bias = tensors
        return Experts(gate_up, down, gate_up_bias, down_bias, *form)

    def check(self, x: object, topk_ids: object, topk_weights: object, values: bool) -> type:
        """The kind of the weights. ValueError unless everything fits together; `values`: those of topk_ids too."""
        gate_up, down = self.gate_up, self.down
        if not isinstance(x, torch.Tensor) or x.dim() != 2 or x.dtype not in FORMULA_DTYPES:
            raise ValueError(f"x: expected [T, H], float32, bfloat16, float16 or float64, got {came(x)}")
        dense = isinstance(gate_up, torch.Tensor)
        kind = torch.Tensor if dense else next((k for k in KINDS if isinstance(gate_up, k)), None)
        if kind is None or not isinstance(down, kind):
            names = ", ".join(k.__name__ for k in KINDS)
            raise ValueError(
                f"gate_up, down: expected two of one class ({names}), got {type(gate_up).__name__} and "
                f"{type(down).__name__}"
            )
        if kind is not torch.Tensor:
            self._check_beside(kind, x)
        shape, hidden = shape_of(gate_up), x.shape[1]
        if len(shape) != 3 or shape[1] % 2 or shape[2] != hidden:
            raise ValueError(f"gate_up: expected shape [E, 2I, {hidden}] for x {list(x.shape)}, got {list(shape)}")
        experts, inner = shape[0], shape[1] // 2
        if shape_of(down) != (experts, hidden, inner):
            raise ValueError(f"down: expected shape {[experts, hidden, inner]}, got {list(shape_of(down))}")
        if kind is torch.Tensor:
            check_like(x, gate_up=(gate_up, shape), down=(down, (experts, hidden, inner)))
        elif isinstance(gate_up, Fp8Blocks) and isinstance(down, Fp8Blocks):
            for name, block in (("gate_up", gate_up.block), ("down", down.block)):
                if block != (128, 128):
                    raise ValueError(f"{name}: expected blocks of (128, 128), got {block}")
        of_gate_up, of_down = (self.gate_up_bias, (experts, 2 * inner)), (self.down_bias, (experts, hidden))
        check_like(x, gate_up_bias=of_gate_up, down_bias=of_down)
        check_ids(topk_ids, experts, values)
        assert isinstance(topk_ids, torch.Tensor)
        if topk_ids.shape[0] != x.shape[0] or topk_ids.shape[1] < 1 or topk_ids.device != x.device:
            raise ValueError(f"topk_ids: expected [{x.shape[0]}, k] on {x.device}, k >= 1, got {came(topk_ids)}")
        floating = isinstance(topk_weights, torch.Tensor) and topk_weights.is_floating_point()
        if not floating or topk_weights.shape != topk_ids.shape or topk_weights.device != x.device:  # type: ignore[attr-defined]
            expected = f"shape {list(topk_ids.shape)}, floating point, on {x.device}"
            raise ValueError(f"topk_weights: expected {expected}, got {came(topk_weights)}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation: expected one of {ACTIVATIONS}, got {self.activation!r}")
        check_flags(interleaved=self.interleaved, batch_invariant=self.batch_invariant)
        if self.batch_invariant:
            require_invariant(kind, x.dtype)
        return kind

    def _check_beside(self, kind: type, x: torch.Tensor) -> None:
        """ValueError unless x has a dtype that goes with quantised weights of that kind."""
        takes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
        if kind in get_args(WeightBeside16Bits) and not autocasts(x):
            takes = takes[1:]
            for name, w in (("gate_up", self.gate_up), ("down", self.down)):
                if x.dtype in takes and w.scales.is_floating_point() and w.scales.dtype is not x.dtype:
                    raise ValueError(
                        f"{name}: expected scales of dtype {x.dtype} as x has (`to(dtype=…)` changes them), got "
                        f"{w.scales.dtype}"
                    )
        if x.dtype not in takes:
            *names, last = (str(d).removeprefix("torch.") for d in takes)
            raise ValueError(f"x: expected {', '.join(names)} or {last} beside {kind.__name__}, got {x.dtype}")


def require_invariant(kind: type, dtype: torch.dtype) -> None:
    """ValueError where experts of that kind have no batch-invariant form."""
    if kind is not torch.Tensor:
        raise ValueError(f"batch_invariant: expected False with {kind.__name__}, whose products depend on the batch")
    if dtype is torch.float64:
        raise ValueError("batch_invariant: expected float32, bfloat16 or float16, got torch.float64")


def shape_of(weight: object) -> tuple[int, ...]:
    """A weight's logical shape; () for what is no weight."""
    if isinstance(weight, Fp8Blocks):
        return tuple(weight.values.shape)
    return tuple(weight.shape) if isinstance(weight, KINDS) else ()  # type: ignore[attr-defined]


def check_like(x: torch.Tensor, **arguments: tuple[object, tuple[int, ...]]) -> None:
    """ValueError unless each argument is None or a tensor of that shape, with x's dtype (or to be cast) and device."""
    for name, (t, shape) in arguments.items():
        if t is None:
            continue
        right = isinstance(t, torch.Tensor) and t.shape == shape and t.device == x.device
        if not right or not (t.dtype is x.dtype or autocasts(x)):  # type: ignore[attr-defined]
            raise ValueError(f"{name}: expected {list(shape)} {x.dtype} on {x.device}, got {came(t)}")


def autocasts(x: torch.Tensor) -> bool:
    """Whether torch.autocast is on for x's device."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)
