"""What a kernel is compiled for, as one parameter: a NamedTuple of constants, which Triton hands on as a bare tuple."""

from collections.abc import Iterable
from typing import Any

import triton
import triton.language as tl


@triton.constexpr_function
def constants(kind: type[Any], shape: Iterable[Any]) -> Any:
    """`shape` as a `kind` again, its fields constants one by one: `static_range` of Triton 3.6 takes nothing else."""
    return kind(*map(tl.constexpr, shape))
