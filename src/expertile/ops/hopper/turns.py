"""Device code of `gluon_fp8` and `gluon_int4`: two consumers take turns at queueing products, 0, 1, 0, 1, …

Left to themselves they fall into step: both products share the tensor cores, end together, and then both promote while
the tensor cores have nothing to do. In turns, one product is queued behind the other's, and promotion goes on under it.
A turn is passed on when the product is queued, not when it is done.

Consumer w waits for its turns at the named barrier w of the two below (`bar.sync`, 128 threads), and the other one
arrives there to pass the turn on (`bar.arrive`, 128 threads). On an H200 this makes tiles of 128 x 256 1.08 to 1.10
times as fast; memory barriers in their stead gained nothing.

Nothing hangs, because:

1. Both consumers take as many turns. They go through the same units, and a unit has as many turns as its number of
   steps times its halves (two if it is wide, else one), whatever else the consumer does: `_multiply` takes one turn a
   step, `_multiply_halves` two, and `_skip`, for a consumer without rows in the unit, the same again. `steps` and
   `wide` come from the unit's number, the sizes and `offs`, never from which consumer asks. No steps, no turns. In
   `gluon_int4` a step is one turn, however many products a consumer queues in it.
2. With n turns each, barrier 0 sees the arrival of `open_turns`, n more of consumer 1, and n waits of consumer 0 with a
   last one in `close_turns`; barrier 1 sees n of either kind. So each wait has its arrival, also where n is 0, and a
   block leaves its barriers as it found them.
3. No arrival runs ahead into the next round. Consumer 1 arrives for turn i + 1 after its turn i, which consumer 0
   passed to it after waiting for its own turn i; likewise consumer 0. This holds for every warp by itself, as each
   round of a barrier needs all four warps of either consumer.
4. No wait is for something later. In the order of steps, and within a step (load, left half of consumer 0, of
   consumer 1, right half of 0, of 1, both give the stage back) everything waits only for what comes before it: a
   product for its load and for the turn before it, a load for a stage that was filled STAGES steps ago, and a store
   for nothing but its own consumer's earlier ones. Such an order has no circle, whatever STAGES is.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _at_barrier(what, who):
    """PTX: 256 threads meet at named barrier 8 or 9 of 16. Triton numbers its own from 0: one for each partition, and a
    few more."""
    return f"bar.{what} {8 + who}, 256; mov.b32 $0, 0;"


@gluon.jit
def take_turn(p, WHO: gl.constexpr):
    """Wait until consumer WHO may queue a product."""
    if p.TURNS:
        gl.inline_asm_elementwise(_at_barrier("sync", WHO), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(p, WHO: gl.constexpr):
    """Consumer WHO has queued its product: the next turn is the other one's."""
    if p.TURNS:
        gl.inline_asm_elementwise(_at_barrier("arrive", 1 - WHO), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def open_turns(p, WHO: gl.constexpr):
    """Before the first product: the first turn is consumer 0's."""
    if WHO == 1:
        pass_turn(p, WHO)


@gluon.jit
def close_turns(p, WHO: gl.constexpr):
    """After the last product: consumer 0 takes the turn that nobody needs, so that no arrival is left over."""
    if WHO == 0:
        take_turn(p, WHO)
