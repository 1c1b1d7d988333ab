"""begin: how a kernel starts that may start before the one before it is done (`kernels.launch(early=True)`)."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(EARLY: tl.constexpr):
    """Until the kernels before this one are done; then the one after it may start, to wait in its turn."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
