"""What memory traffic explains: bytes by formula for every operator, unfused, as torch moves them, and as ours does."""

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from expertile.lab.traffic.model import Formula, Step, Way, call

__all__ = ["Formula", "Step", "Way", "call", "formulas"]


@cache
def formulas() -> Mapping[str, Formula]:
    """How the traffic of every operator is counted, by the operator's name; grouped products are counted by
    `grouped.grouped_ways`."""
    from expertile.lab.traffic import attention, pointwise, rows

    return MappingProxyType({f.op: f for module in (rows, attention, pointwise) for f in module.FORMULAS})
