"""Rows that several CTAs share: each reduces its slice, then sends its two numbers for each row to all the others.

Triton has no operation for that, so these are PTX: `mapa` finds another CTA's copy of an address; `st.async` writes
there and counts its bytes on that CTA's mbarrier, whose phase ends when all have come. Unlike `barrier.cluster` with
release and acquire, an exchange waits for no stores of earlier rows.

Order in a kernel: `join` first, `joined` before the first `send`, then `send`, `wait`, `received` for exchange 0, 1, …
Two sets of slots alternate. A set is written again two exchanges later, by a CTA that has this CTA's numbers of the
exchange between. Those were sent after a reduction over all warps, hence after all threads had read the slots. A CTA
may leave after its last `wait`: nothing more is on its way to it.
"""

import triton
import triton.language as tl


@triton.jit
def _asm(PTX: tl.constexpr, CONSTRAINTS: tl.constexpr, operands):
    """PTX with an effect, once for each element; its integer $0."""
    return tl.inline_asm_elementwise(PTX, CONSTRAINTS, operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def join():
    """Make the mbarriers and the slots, and tell the cluster; returns where they lie in shared memory. Room for 2 sets
    of 4 rows of 8 CTAs of 2 float32, behind 2 mbarriers."""
    return _asm(
        """{
        .shared .align 16 .b8 row_slots[528];
        .reg .pred first;
        .reg .b32 thread, place;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        mov.u32 place, row_slots;
        @first mbarrier.init.shared::cta.b64 [place], 1;
        @first mbarrier.init.shared::cta.b64 [place + 8], 1;
        @first fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.relaxed.aligned;
        mov.u32 $0, place;
        }""",
        "=r",
        (),
    )


@triton.jit
def position(CLUSTER: tl.constexpr):
    """This program's number among clusters, its rank in its cluster, and what `join` returned."""
    program = tl.program_id(0) // CLUSTER
    rank = tl.program_id(0) % CLUSTER
    place = join() if CLUSTER > 1 else 0
    return program, rank, place


@triton.jit
def joined():
    """Until every CTA of the cluster has joined."""
    _asm("barrier.cluster.wait.acquire.aligned; // $0", "=r", ())


@triton.jit
def _expect(barrier, nbytes):
    _asm(
        """{
        .reg .pred first;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,r,r",
        (barrier, nbytes),
    )


@triton.jit
def _send_one(place, barrier, a, b, CLUSTER: tl.constexpr):
    """Thread i sends to CTA i."""
    _asm(
        """{
        .reg .pred sends;
        .reg .b32 thread, there, counts;
        mov.u32 thread, %tid.x;
        setp.lt.u32 sends, thread, $5;
        @sends mapa.shared::cluster.u32 there, $1, thread;
        @sends mapa.shared::cluster.u32 counts, $2, thread;
        @sends st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [there], {$3, $4}, [counts];
        mov.u32 $0, 0;
        }""",
        "=r,r,r,f,f,r",
        (place, barrier, a, b, CLUSTER),
    )


@triton.jit
def one_of(values, r: tl.constexpr):
    """values[r] as a scalar."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == r, values, 0.0), 0)


@triton.jit
def with_one(values, r: tl.constexpr, value):
    """`values` with values[r] = value."""
    return tl.where(tl.arange(0, values.shape[0]) == r, value, values)


@triton.jit
def send(place, exchange, rank, a, b, CLUSTER: tl.constexpr):
    """Give all CTAs of the cluster, this one included, the float32 vectors a and b of one number per row."""
    ROWS: tl.constexpr = a.shape[0]
    barrier = place + (exchange & 1) * 8
    _expect(barrier, CLUSTER * ROWS * 8)
    own = place + 16 + (exchange & 1) * (CLUSTER * ROWS * 8) + rank * 8
    for r in tl.static_range(ROWS):
        _send_one(own + r * (CLUSTER * 8), barrier, one_of(a, r), one_of(b, r), CLUSTER)


@triton.jit
def wait(place, exchange):
    """Until the numbers of all CTAs have come."""
    _asm(
        """{
        .reg .pred done;
        again:
        mbarrier.try_wait.parity.shared::cta.b64 done, [$1], $2;
        @!done bra again;
        mov.u32 $0, 0;
        }""",
        "=r,r,r",
        (place + (exchange & 1) * 8, (exchange >> 1) & 1),
    )


@triton.jit
def received(place, exchange, r: tl.constexpr, ROWS: tl.constexpr, CLUSTER: tl.constexpr):
    """All CTAs' two numbers of row r, [CLUSTER] float32 each, in order of rank: the same sum in every CTA and run."""
    first = place + 16 + (exchange & 1) * (CLUSTER * ROWS * 8) + r * (CLUSTER * 8)
    return tl.inline_asm_elementwise(
        "ld.shared.v2.f32 {$0, $1}, [$2];",
        "=f,=f,r",
        [first + tl.arange(0, CLUSTER) * 8],
        dtype=(tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )
