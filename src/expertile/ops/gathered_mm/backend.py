"""What a backend of the gathered products is given, and fills."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from expertile.ops import backend
from expertile.ops.gathered_mm.problem import GatherProblem, Product


@dataclass(frozen=True)
class Operands:
    """The tensors of one call, as validated by `problem.describe`.

    a, b: as in the table of `problem` (BACKWARD: b is the down-projection transposed to [E, H, I]). offs, rows, slots:
    int32, contiguous. weights: float32, contiguous, [T, k]. pre: [R, 2I], contiguous.
    """

    a: torch.Tensor
    b: torch.Tensor
    offs: torch.Tensor
    rows: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    pre: torch.Tensor | None = None


# The outputs in the order of `GatherProblem.out_shapes`: contiguous tensors made by `new_outputs`, or None.
Outputs = tuple[Any, ...]
# `run(problem, operands, config, outputs)` queues the work of the problem's product, which fills the outputs. Rows past
# offs[-1] are left alone; the routing weights' gradient comes zeroed, and the slots of rows before offs[-1] are
# written. There is at least one expert, one row and one column. Nothing waits for the GPU. BACKWARD's dpre may be pre
# itself: an element of pre is read before the same element of dpre is written.
Run = Callable[[GatherProblem, Operands, Any, Outputs], None]


Backend = backend.Backend[GatherProblem, Run]


def new_outputs(problem: GatherProblem, operands: Operands, overwrite_pre: bool = False) -> Outputs:
    """Fresh outputs: uninitialised, but for the routing weights' gradient, which is zero. BACKWARD's dpre is pre with
    `overwrite_pre`, where every backend can write there."""
    a = operands.a
    if problem.product is not Product.BACKWARD:
        return tuple(None if shape is None else a.new_empty(shape) for shape in problem.out_shapes)
    dpre_shape, act_shape, _ = problem.out_shapes
    assert dpre_shape is not None and act_shape is not None and operands.pre is not None
    spare = overwrite_pre and operands.pre.is_contiguous() and operands.pre.data_ptr() % 16 == 0
    dpre = operands.pre if spare else a.new_empty(dpre_shape)
    dweights = torch.zeros(problem.weights_shape, dtype=torch.float32, device=a.device)
    return dpre, a.new_empty(act_shape), dweights
