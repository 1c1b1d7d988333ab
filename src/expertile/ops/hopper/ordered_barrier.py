"""An ordered barrier for two or three consumers: they queue their products in the order 0, 1, (2,) 0, 1, …

Without an order the products share the tensor cores and end together. The tensor cores then idle while all consumers
promote their sums. With the order one product is queued behind the other, and promotion runs under it. A consumer
arrives when its product is queued, not when the product is done.

Consumer w waits at named barrier w (`bar.sync`, 128 threads); the consumer before w arrives there (`bar.arrive`, 128
threads). On an H200 tiles of 128 x 256 are 1.08 to 1.10 times as fast with it.

The barrier cannot deadlock:

1. All consumers have equally many rounds, one wait and one arrival each. They pass through the same units. A unit has
   one round for each step and half (two halves if it is wide, else one). `_multiply` has one round a step,
   `_multiply_halves` two, and `_skip`, for a consumer without rows in the unit, the same number. `steps` and `wide`
   depend on the unit's number, the sizes and `offs`, not on the consumer. In `gluon_int4` a step is one round.
2. With n rounds each, barrier 0 sees the arrival of `ordered_begin`, n arrivals of the last consumer, n waits of
   consumer 0, and the wait of `ordered_end`. Each other barrier sees n arrivals and n waits. Each wait has its arrival,
   also where n is 0, and a block leaves its barriers as it found them.
3. No arrival runs ahead into the next round. The consumers take their rounds one after the other, so a consumer arrives
   for round i + 1 of the next one's barrier only after that one has waited for its round i. Each warp obeys this by
   itself, because a round of a barrier needs all four warps of either consumer.
4. Each operation waits for earlier operations only. The order within a step is: load, left half of each consumer in
   turn, right half of each in turn, release of the stage. A product waits for its load and for the round before it. A
   load waits for a stage that was filled STAGES steps ago. A store waits for its own consumer's earlier stores. The
   order has no circle, whatever STAGES is.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _at_barrier(what, consumer):
    """PTX: 256 threads meet at named barrier 8, 9 or 10 of 16. Triton numbers its own barriers from 0: one for each
    partition, and a few more."""
    return f"bar.{what} {8 + consumer}, 256; mov.b32 $0, 0;"


@gluon.jit
def ordered_wait(p, CONSUMER: gl.constexpr):
    """Wait until consumer CONSUMER may queue a product."""
    if p.ORDERED:
        gl.inline_asm_elementwise(_at_barrier("sync", CONSUMER), "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def ordered_arrive(p, CONSUMER: gl.constexpr):
    """Let the next consumer queue its product; CONSUMER has queued its own."""
    if p.ORDERED:
        gl.inline_asm_elementwise(
            _at_barrier("arrive", (CONSUMER + 1) % p.CONSUMERS), "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def ordered_begin(p, CONSUMER: gl.constexpr):
    """Before the first product: the last consumer lets consumer 0 go first."""
    if CONSUMER == p.CONSUMERS - 1:
        ordered_arrive(p, CONSUMER)


@gluon.jit
def ordered_end(p, CONSUMER: gl.constexpr):
    """After the last product: consumer 0 waits for the arrival that is left over."""
    if CONSUMER == 0:
        ordered_wait(p, CONSUMER)
