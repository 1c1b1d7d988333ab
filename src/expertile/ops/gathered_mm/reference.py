"""The definition of right in plain torch: select rows, multiply, activate. Also what runs where no kernel does.

`compute` multiplies by `expertile.grouped_mm` (float32 accumulation, results in the operands' dtype; nothing waits for
the GPU). The activation is computed in at least float32, from the pre-activation as it is stored, so that a backward
pass that starts from it sees the same numbers.

Batch-invariant, each row is activated alone: torch computes the last elements of a tensor with other instructions.
"""

from dataclasses import replace

import torch

from expertile.ops.backend import NoConfig
from expertile.ops.gathered_mm import activation as act
from expertile.ops.gathered_mm.backend import Backend, Operands, Outputs
from expertile.ops.gathered_mm.problem import GatherProblem, Product
from expertile.ops.grouped_mm.api import grouped_mm
from expertile.ops.grouped_mm.backends.loop import RowByRow
from expertile.ops.launch.device import wide


def _select(x: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return x if rows is None else x.index_select(0, rows)


def compute(problem: GatherProblem, operands: Operands) -> Outputs:
    """The outputs of `problem`; rows past offs[-1] are unspecified. Differentiable in no operand."""
    a, b, offs, rows = operands.a, operands.b, operands.offs, operands.rows
    if problem.product is Product.WGRAD:
        left = _select(a, rows if problem.gathered == "a" else None)
        right = _select(b, rows if problem.gathered == "b" else None)
        return (grouped_mm(left.t(), right, offs=offs),)
    return _epilogue(problem, operands, grouped_mm(_select(a, rows), b, offs=offs, bias=operands.bias))


def _epilogue(problem: GatherProblem, operands: Operands, out: torch.Tensor) -> Outputs:
    """The outputs of `problem` but a weight gradient, from the product `out`."""
    offs = operands.offs
    if problem.product is Product.MM:
        return (out,)
    if problem.product is Product.GATED:
        gate, up = act.split(wide(out), problem.interleaved)
        return act.activate(gate, up, problem.activation).to(out.dtype), out if problem.save_pre else None
    assert operands.pre is not None and operands.slots is not None and operands.weights is not None
    slots, weights = operands.slots.long(), operands.weights.flatten()
    weight = weights.index_select(0, slots).to(wide(out).dtype)[:, None]
    dact, (gate, up) = wide(out), act.split(wide(operands.pre), problem.interleaved)
    value, dgate, dup = act.activate_backward(gate, up, weight * dact, problem.activation)
    dpre = act.join(dgate, dup, problem.interleaved).to(out.dtype)
    # Rows past offs[-1] claim slot 0: theirs go to one slot more, which is cut off.
    inside = torch.arange(slots.shape[0], device=slots.device) < offs[-1]
    sums = torch.where(inside, (dact * value).sum(-1), 0.0)
    dweights = sums.new_zeros(weights.shape[0] + 1)
    dweights.scatter_(0, torch.where(inside, slots, weights.shape[0]), sums)
    return dpre, (weight * value).to(out.dtype), dweights[:-1].view(problem.weights_shape)


def _row_by_row(problem: GatherProblem, operands: Operands) -> Outputs:
    """`compute` with batch-invariant rows; on a CPU."""
    o = operands
    assert o.offs is not None
    out = grouped_mm(_select(o.a, o.rows), o.b, offs=o.offs, bias=o.bias, batch_invariant=True)
    results: Outputs = tuple(None if s is None else o.a.new_zeros(s) for s in problem.out_shapes)
    if problem.product is Product.BACKWARD:
        results = (*results[:2], o.weights.new_zeros(problem.weights_shape))  # type: ignore[union-attr]
    one = torch.ones(1, dtype=o.offs.dtype, device=o.offs.device)
    for r in range(int(o.offs[-1])):
        pre, slot = (None if x is None else x[r : r + 1].clone() for x in (o.pre, o.slots))
        row = _epilogue(problem, replace(o, offs=one, pre=pre, slots=slot), out[r : r + 1].clone())
        for place, (target, value) in enumerate(zip(results, row, strict=True)):
            if target is not None and value is not None and place < 2:
                target[r] = value[0]
        if slot is not None and results[2] is not None and row[2] is not None:
            results[2].view(-1)[slot] = row[2].view(-1)[slot]
    return results


def _run(problem: GatherProblem, operands: Operands, config: NoConfig | RowByRow, outputs: Outputs) -> None:
    inside = torch.arange(problem.rows, device=operands.a.device)[:, None] < operands.offs[-1]
    results = _row_by_row(problem, operands) if isinstance(config, RowByRow) else compute(problem, operands)
    for place, (target, value) in enumerate(zip(outputs, results, strict=True)):
        if target is None or value is None:
            continue
        if problem.product is Product.WGRAD or place == 2:  # of experts or of slots, not of rows
            target.copy_(value)
        else:
            torch.where(inside, value, target, out=target)


BACKEND = Backend(
    name="reference",
    summary="plain torch around grouped_mm: rows selected, activation in torch",
    run=_run,
    invariant=lambda p, device: (RowByRow(),) if device.kind == "cpu" and p.product is not Product.WGRAD else (),
)
