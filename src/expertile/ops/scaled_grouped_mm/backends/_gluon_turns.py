"""Device code of the `gluon_fp8` backend: two consumers take turns at queueing products.

Left to themselves they fall into step: both products share the tensor cores, end together, and then both promote while
the tensor cores have nothing to do. In turns, one product is queued behind the other's, and promotion goes on under it.

A consumer passes the turn when its product is queued, not when it is done. TURNS: 0 off, 1 with memory barriers, 2 with
the named barriers of the multiprocessor, 3 as 1 but passed before the product is queued.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def make_turns(TURNS: gl.constexpr):
    """A barrier for each consumer. To be called before `fence_async_shared` of the kernel's start."""
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    if TURNS != 0:
        mbarrier.init(turns.index(0), count=1)
        mbarrier.init(turns.index(1), count=1)
    return turns


@gluon.constexpr_function
def _named_barrier(what, who):
    """PTX: both consumers' 256 threads meet at barrier 8 or 9, far from those that Triton numbers from 0."""
    return f"bar.{what} {8 + who}, 256; mov.b32 $0, 0;"


@gluon.jit
def give_first_turn(p, WHO: gl.constexpr):
    """Consumer 1, before its first product: the first turn is consumer 0's."""
    if p.TURNS == 2 and WHO == 1:
        gl.inline_asm_elementwise(_named_barrier("arrive", 0), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_turn(p, WHO: gl.constexpr, number):
    """Wait until consumer WHO may queue its product number `number` (any number as odd or even will do)."""
    if p.TURNS == 1 or p.TURNS == 3:
        # The first turn is consumer 0's: a fresh barrier lets it pass.
        mbarrier.wait(p.turns.index(WHO), (number + 1 - WHO) & 1)
    if p.TURNS == 3:
        mbarrier.arrive(p.turns.index(1 - WHO), count=1)
    if p.TURNS == 2:
        gl.inline_asm_elementwise(_named_barrier("sync", WHO), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(p, WHO: gl.constexpr):
    if p.TURNS == 1:
        mbarrier.arrive(p.turns.index(1 - WHO), count=1)
    if p.TURNS == 2:
        gl.inline_asm_elementwise(_named_barrier("arrive", 1 - WHO), "=r", [], dtype=gl.int32, is_pure=False, pack=1)
