"""What a backend of the gathered products is: a frozen value that says what it can do, with which configs, and runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from expertile.device import Device
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


# The outputs in the order of `GatherProblem.out_shapes`: contiguous, made by `new_outputs`.
Outputs = tuple[torch.Tensor | None, ...]
Run = Callable[[GatherProblem, Operands, Any, Outputs], None]


def never(problem: GatherProblem, device: Device) -> tuple[Any, ...]:
    """The batch-invariant configs of a backend that has none."""
    return ()


@dataclass(frozen=True)
class Backend:
    """One way to compute the gathered products.

    `supports(problem, device)` is pure: the reason why not, or None. `configs(problem, device)` lists the configs worth
    trying, the default first. `mm`, `gated`, `backward` and `wgrad` are `run(problem, operands, config, outputs)`: they
    queue work on the current stream that fills the outputs, or are None where the backend does not offer that product.
    Rows past offs[-1] are left alone; the routing weights' gradient comes zeroed, and the slots of rows before
    offs[-1] are written. There is at least one expert, one row and one column. Nothing waits for the GPU.
    """

    name: str
    summary: str
    supports: Callable[[GatherProblem, Device], str | None]
    configs: Callable[[GatherProblem, Device], tuple[Any, ...]]
    mm: Run | None = None
    gated: Run | None = None
    backward: Run | None = None
    wgrad: Run | None = None
    # The configs, the default first, with which a row's results have the same bits in every problem that differs from
    # this one in numbers of rows and tokens alone, whichever of these configs each problem takes.
    invariant: Callable[[GatherProblem, Device], tuple[Any, ...]] = never

    def run(self, product: Product) -> Run | None:
        """The function for that product, or None."""
        return {
            Product.MM: self.mm,
            Product.GATED: self.gated,
            Product.BACKWARD: self.backward,
            Product.WGRAD: self.wgrad,
        }[product]

    def refuses(self, problem: GatherProblem, device: Device) -> str | None:
        """Why this backend cannot take the problem: it lacks the product, or what `supports` says; None if it can."""
        if self.run(problem.product) is None:
            return f"does not offer the product {problem.product.value}"
        return self.supports(problem, device)


def new_outputs(problem: GatherProblem, operands: Operands) -> Outputs:
    """Fresh outputs: uninitialised, but for the routing weights' gradient, which is zero."""
    a = operands.a
    made = [None if shape is None else a.new_empty(shape) for shape in problem.out_shapes]
    if problem.product is Product.BACKWARD:
        made[2] = torch.zeros(problem.weights_shape, dtype=torch.float32, device=a.device)
    return tuple(made)
