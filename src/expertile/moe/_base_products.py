"""The two products of the expert MLPs and their gradients, rows in expert order, whatever the weights are kept as."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from expertile.formats.fp8 import Fp8Blocks
from expertile.formats.weight_only import takes_fp8, weight_of
from expertile.moe.expert_weights import Experts, shape_of
from expertile.moe.permute import Permutation
from expertile.ops.gathered_mm.api import gated_backward_mm, gathered_mm
from expertile.ops.grouped_mm.backend import Pair
from expertile.ops.low_rank import api as low_rank
from expertile.ops.low_rank import joined
from expertile.ops.low_rank.api import Form
from expertile.ops.quantize.api import quantize_activations, quantize_per_row, quantize_swiglu
from expertile.ops.scaled_grouped_mm.api import scaled_grouped_mm
from expertile.ops.weight_only_mm.api import activation_gradient, weight_only_mm

_T = torch.Tensor
_Maybe = torch.Tensor | None


@dataclass(frozen=True)
class BaseProducts:
    """gate_up [E, 2I, H] and down [E, H, I], of one kind and frozen. Nothing here is differentiable by itself."""

    gate_up: Any
    down: Any

    @staticmethod
    def parts(experts: Experts) -> tuple[tuple[Any, ...], tuple[_Maybe, ...]]:
        """(kinds, tensors) of the two weights, which is what autograd and torch.compile take; `of` joins them."""
        kinds, tensors = zip(*(_parts(w) for w in (experts.gate_up, experts.down)), strict=True)
        return kinds, sum(tensors, ())

    @staticmethod
    def of(kinds: tuple[Any, ...], tensors: Sequence[_Maybe]) -> "BaseProducts":
        """From what `parts` made."""
        half = len(tensors) // 2
        gate_up, down = (_joined(k, t) for k, t in zip(kinds, (tensors[:half], tensors[half:]), strict=True))
        return BaseProducts(gate_up, down)

    @property
    def experts(self) -> int:
        """E."""
        return shape_of(self.gate_up)[0]

    def up(self, x: _T, order: Permutation, bias: _Maybe) -> _T:
        """[R, 2I]: x[rows] @ gate_up^T (+ bias). x [T, H]."""
        if isinstance(self.gate_up, torch.Tensor):
            return gathered_mm(x, self.gate_up.transpose(1, 2), order.rows, order.offs, bias=bias)
        if takes_fp8(self.gate_up):  # quantised once for each token and not for each of its rows
            values, scales = _rounded(x, self.gate_up)
            rows = values.view(torch.uint8).index_select(0, order.rows).view(torch.float8_e4m3fn)
            scales = scales.t().index_select(-1, order.rows).t()  # those of a tile's rows side by side
            return _scaled(rows, scales, self.gate_up, order, bias, x.dtype)
        return weight_only_mm(x.index_select(0, order.rows), self.gate_up, offs=order.offs, bias=bias)

    def gated_up(self, x: _T, order: Permutation, bias: _Maybe, form: Form, more: Pair | None) -> tuple[_T, _T] | None:
        """(f(pre), pre) with pre = x[rows] @ gate_up^T + u @ b^T (+ bias), more = (u [R, r], b [E, 2I, r]); None where
        no kernel makes both at once."""
        if not (isinstance(self.gate_up, torch.Tensor) and isinstance(self.down, torch.Tensor)):
            return None
        pair = None if more is None else (more[0], more[1].transpose(1, 2))
        w = self.gate_up.transpose(1, 2)
        return joined.gated(x, w, order.rows, order.offs, bias, form, pair)

    def gates(self, x: _T, order: Permutation, bias: _Maybe, form: Form) -> bool:
        """Whether `gated_up` with an adapter has a kernel for these operands."""
        if not (isinstance(self.gate_up, torch.Tensor) and isinstance(self.down, torch.Tensor)):
            return False
        return joined.gates(x, self.gate_up.transpose(1, 2), order.rows, order.offs, bias, form)

    def activated(
        self, pre: _T, u: _Maybe, b: _Maybe, a: _Maybe, order: Permutation, form: Form, scale: float
    ) -> tuple[_T | Fp8Blocks, _Maybe]:
        """`low_rank.activated`, (act [R, I], v); act in FP8 for SwiGLU, of which one kernel makes it so."""
        if not (takes_fp8(self.down) and form[0] == "swiglu"):
            return low_rank.activated(pre, u, b, a, order.offs, form, scale)
        if u is None and a is None:
            return quantize_swiglu(pre, interleaved=form[1]), None
        # Rounded once, of float32, as that kernel does: an adapter of zeros changes nothing.
        act, v = low_rank.activated(pre, u, b, a, order.offs, form, scale, dtype=torch.float32)
        return quantize_activations(act), v

    def down_of(
        self, act: _T | Fp8Blocks, order: Permutation, bias: _Maybe, dtype: torch.dtype, more: Pair | None = None
    ) -> _T:
        """[R, H] in `dtype`: act [R, I] @ down^T (+ bias) + v @ b^T, more = (v [R, r], b [E, H, r])."""
        if takes_fp8(self.down):
            rounded = (act.values, act.scales) if isinstance(act, Fp8Blocks) else _rounded(act, self.down)
            y = _scaled(*rounded, self.down, order, bias, dtype)
        else:
            assert isinstance(act, torch.Tensor)
            if isinstance(self.down, torch.Tensor):
                pair = None if more is None else (more[0], more[1].transpose(1, 2))
                return joined.product(act, self.down.transpose(1, 2), order.offs, pair, bias)
            y = weight_only_mm(act, self.down, offs=order.offs, bias=bias)
        return y if more is None else low_rank.expand(y, *more, order.offs)

    def down_gradient(self, dy: _T, order: Permutation) -> _T:
        """[R, I]: dy[rows] @ down. dy [T, H]."""
        if isinstance(self.down, torch.Tensor | Fp8Blocks):
            return gathered_mm(dy, _dense(self.down, dy.dtype), order.rows, order.offs)
        return activation_gradient(dy.index_select(0, order.rows), self.down, order.offs)

    def gated_down_gradient(
        self, dy: _T, order: Permutation, weights: _T, pre: _T, form: Form, overwrite_pre: bool, more: Pair | None
    ) -> tuple[_T, _T, _T] | None:
        """(dpre, act_w, dweights) of `gated_backward_mm` with the gradient of act as dy[rows] @ down + dv @ a, more =
        (dv [R, r], a [E, r, I]); None where no kernel has it all."""
        if not isinstance(self.down, torch.Tensor | Fp8Blocks):
            return None
        down, routing = _dense(self.down, dy.dtype), (order.rows, order.slots, weights, pre, order.offs)
        if more is not None:
            return joined.gated_backward(dy, down, *routing, form, overwrite_pre, more)
        how: Any = {"activation": form[0], "interleaved": form[1], "overwrite_pre": overwrite_pre}
        return gated_backward_mm(dy, down.transpose(1, 2), *routing, **how)

    def up_gradient(self, dpre: _T, order: Permutation, more: Pair | None = None) -> _T:
        """[R, H]: dpre [R, 2I] @ gate_up + du @ a, more = (du [R, r], a [E, r, H])."""
        if isinstance(self.gate_up, torch.Tensor | Fp8Blocks):
            return joined.product(dpre, _dense(self.gate_up, dpre.dtype), order.offs, more)
        dx = activation_gradient(dpre, self.gate_up, order.offs)
        return dx if more is None else low_rank.expand(dx, more[0], more[1].transpose(1, 2), order.offs)


def _rounded(x: _T, w: Any) -> tuple[_T, _T]:
    """x [R, K] in FP8 for its product with w, and the scales: of each 1×128, or beside 4 bits, whose product is a fifth
    faster with them, of each row."""
    if isinstance(w, Fp8Blocks):
        blocks = quantize_activations(x)
        return blocks.values, blocks.scales
    rows = quantize_per_row(x)
    return rows.values, rows.scales[:, 0]


def _scaled(a: _T, scale_a: _T, w: Any, order: Permutation, bias: _Maybe, dtype: torch.dtype) -> _T:
    b, scales = (w.values.transpose(1, 2), w.scales) if isinstance(w, Fp8Blocks) else (w, None)
    return scaled_grouped_mm(a, b, scale_a, scales, offs=order.offs, bias=bias, out_dtype=dtype)


def _dense(weight: torch.Tensor | Fp8Blocks, dtype: torch.dtype) -> _T:
    return weight if isinstance(weight, torch.Tensor) else weight.dequantize(dtype)


def _parts(weight: Any) -> tuple[Any, tuple[_Maybe, ...]]:
    if isinstance(weight, torch.Tensor):
        return None, (weight,)
    if isinstance(weight, Fp8Blocks):
        return weight.block, (weight.values, weight.scales)
    return weight.parts[3:], weight.parts[:3]


def _joined(kind: Any, tensors: Sequence[Any]) -> Any:
    if kind is None:
        return tensors[0]
    return Fp8Blocks(tensors[0], tensors[1], kind) if len(tensors) == 2 else weight_of(*tensors, *kind)
