"""The gathered products from parts: rows copied into expert order, the machine's fastest grouped product, one pointwise
kernel. What the fused kernels have to beat.

    MM        gather_rows, grouped_mm                              R (K read + K written) + the product's bytes
    GATED     gather_rows, grouped_mm -> pre, gated_activation     … + 3 R I
    BACKWARD  gather_rows, grouped_mm -> act_w's place, gated_backward over it   … + 6 R I
    WGRAD     gather_rows, grouped_mm (ragged K), for some columns of the gathered operand after another

in elements; without `rows` nothing is copied. The copies of a weight gradient take `COPY_NBYTES` at a time, not 2 R K.
Limits: the products are compute-bound and run at `grouped_mm`'s rate; the passes before and after are bound by memory,
and nothing overlaps them.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import Tensor

from expertile.device import Device
from expertile.ops.backend import Request
from expertile.ops.gathered_mm import pointwise
from expertile.ops.gathered_mm.backend import Backend, Operands, Outputs
from expertile.ops.gathered_mm.problem import GatherProblem, Product
from expertile.ops.grouped_mm.api import select
from expertile.ops.grouped_mm.backend import Backend as GroupedBackend
from expertile.ops.grouped_mm.backend import Operands as GroupedOperands
from expertile.ops.grouped_mm.problem import Problem
from expertile.ops.launch.device import no_triton

# Bytes of one copy for a weight gradient, of all rows and some columns. Each product reads the other operand once more.
COPY_NBYTES = 2**27
_COLUMNS = 512  # of a copy, a multiple: tiles stay whole


@dataclass(frozen=True)
class Config:
    """`grouped`: the backend of `grouped_mm` for the product, or "auto". `batch_invariant`: as for `grouped_mm`."""

    grouped: str = "auto"
    batch_invariant: bool = False


@lru_cache(maxsize=1024)
def _planned(problem: GatherProblem, config: Config, device: int) -> tuple[Problem, GroupedBackend, Any]:
    """The grouped product inside, the backend and the config for it, on GPU `device` (-1: the CPU)."""
    inner = problem.grouped()
    on = Device.current("cpu" if device < 0 else device)
    return inner, *select(inner, on, Request(config.grouped, None, config.batch_invariant))


def _product(problem: GatherProblem, operands: Operands, config: Config, a: Tensor, b: Tensor, out: Tensor) -> None:
    inner, backend, chosen = _planned(problem, config, a.get_device())
    backend.run(inner, GroupedOperands(a, b, operands.offs, operands.bias), chosen, out)


def run(problem: GatherProblem, operands: Operands, config: Config, outputs: Outputs) -> None:
    """Queue gather, product and pointwise kernel on the current stream; pre is made even where it isn't kept."""
    p, o = problem, operands
    if p.product is Product.WGRAD:
        _wgrad(p, o, config, *outputs)
        return
    ordered = o.a if o.rows is None else pointwise.gather_rows(o.a, o.rows, o.offs)
    if p.product is Product.MM:
        _product(p, o, config, ordered, o.b, outputs[0])
    elif p.product is Product.GATED:
        act, pre = outputs
        pre = act.new_empty((p.m, p.n)) if pre is None else pre
        _product(p, o, config, ordered, o.b, pre)
        pointwise.gated_activation(pre, o.offs, act, p.activation, p.interleaved)
    else:
        assert o.pre is not None and o.slots is not None and o.weights is not None
        dpre, act_w, dweights = outputs
        _product(p, o, config, ordered, o.b, act_w)
        pointwise.gated_backward(
            act_w, o.pre, o.slots, o.weights, o.offs, dpre, act_w, dweights, p.activation, p.interleaved
        )


def _wgrad(problem: GatherProblem, operands: Operands, config: Config, out: Tensor) -> None:
    a, b, rows = operands.a, operands.b, operands.rows
    if rows is None:
        _product(problem, operands, config, a.t(), b, out)
        return
    gathered, dim = (a, 1) if problem.gathered == "a" else (b, 2)
    for start, count in _parts(problem, gathered.shape[1]):
        copied = pointwise.gather_rows(gathered.narrow(1, start, count), rows, operands.offs)
        target = out.narrow(dim, start, count)
        if problem.gathered == "a":
            _product(replace(problem, m=count), operands, config, copied.t(), b, target)
        else:
            _product(replace(problem, n=count), operands, config, a.t(), copied, target)
        del copied  # before the next one is made


def _parts(problem: GatherProblem, columns: int) -> list[tuple[int, int]]:
    """(first, number) of the columns that are copied at a time."""
    row = max(1, problem.rows * problem.dtype.itemsize)
    most = max(_COLUMNS, COPY_NBYTES // row // _COLUMNS * _COLUMNS)
    return [(start, min(most, columns - start)) for start in range(0, columns, most)]


def invariant(problem: GatherProblem, device: Device) -> tuple[Config, ...]:
    """A batch-invariant product, between kernels whose programs sum a row in one order for all numbers of rows."""
    return () if problem.product is Product.WGRAD else (Config(batch_invariant=True),)


BACKEND = Backend(
    name="composed",
    summary="rows copied, grouped_mm, one pointwise kernel (sm_80+)",
    supports=no_triton,
    configs=lambda problem, device: (Config(),),
    run=run,
    invariant=invariant,
)
