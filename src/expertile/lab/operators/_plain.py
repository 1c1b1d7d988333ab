"""Four-bit weights as other packages take them: two neighbours of K in a byte, the even one in the low nibble; and
which way of several to run a rival is fastest where it leaves that to its user."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from expertile.formats.int4.weight import Int4Weight
from expertile.formats.mxfp4 import Mxfp4Weight
from expertile.lab.race.operator import Call

Weight = Int4Weight | Mxfp4Weight
Option = TypeVar("Option")
_fastest: dict[Any, Any] = {}
_CALLS = 5


def codes(weight: Weight, expert: int) -> Tensor:
    """uint8 [N, K], 0 … 15, of one expert: INT4 with its zero at 8, or e2m1."""
    one = weight.part(expert, expert + 1)
    return (one.values() if isinstance(one, Int4Weight) else one.codes())[0]


def packed(weight: Weight) -> Tensor:
    """uint8 [G, N, K/2]."""
    groups, n, k = weight.shape
    out = torch.empty(groups, n, k // 2, dtype=torch.uint8, device=weight.device)
    for g in range(groups):
        of_expert = codes(weight, g)
        out[g] = of_expert[:, ::2] | of_expert[:, 1::2] << 4
    return out


def scales(weight: Weight) -> Tensor:
    """[G, N, K / group_size]: of INT4 floating point, of MXFP4 e8m0 bytes."""
    if isinstance(weight, Int4Weight):
        return weight.scales.transpose(1, 2).contiguous()
    return weight.scale_bytes()


def fastest(key: object, options: Sequence[Option], default: Option, bind: Callable[[Option], Call]) -> Call:
    """`bind` of the option whose call takes least time on this GPU, found once for each `key`; without a GPU, of
    `default`. An option that raises is left out, unless all do."""
    if not torch.cuda.is_available():
        return bind(default)
    if key not in _fastest:
        times: list[tuple[float, int]] = []
        errors: list[Exception] = []
        for i, option in enumerate(options):
            try:
                times.append((_milliseconds(bind(option)), i))
            except RuntimeError as error:
                errors.append(error)
        if not times:
            raise errors[0]
        _fastest[key] = options[min(times)[1]]
    return bind(_fastest[key])


def _milliseconds(call: Call) -> float:
    """Of the fastest of a few calls, compiled before."""
    call()
    found = []
    for _ in range(_CALLS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return min(found)
