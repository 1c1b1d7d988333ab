"""Faults planted in the Hopper kernels."""

from tests.support.mutants import Fault, before

FORWARD = {
    "V is used before it is there": Fault("_values_here", "mbarrier.wait(...)"),
    "K is used before it is there": Fault("_scores", "mbarrier.wait(...)"),
    "K is freed before its product is done": Fault(
        "_block", "mbarrier.arrive(_.k_empty.index(_), ...)", before("warpgroup_mma_wait(1, ...)")
    ),
    "V is freed before its product is done": Fault(
        "_block", "mbarrier.arrive(_.v_empty.index(_), ...)", before("warpgroup_mma_wait(0, ...)")
    ),
    "O is scaled before it is there": Fault("_block", "warpgroup_mma_wait(0, ...)"),
    "the maximum's change is forgotten": Fault("_add", "a_ * gl.expand_dims(...) + b_", "a_ + b_"),
    "a block on the diagonal goes without a mask": Fault("_consumer", "a_ - _.BLOCK_N + 2", "a_ + 2"),
    "the producer starts on the wrong phase": Fault("_load_keys", "a_ ^ 1", "a_"),
    "Q's buffer is given back while O leaves": Fault("_consumer", "tma.store_wait(0)", nth=0),
    "no fence before O leaves": Fault("_finish", "fence_async_shared()"),
    "a mask is one key too wide": Fault("mask_keys", "a_ <= b_", "a_ <= b_ + 1"),
    "rows without keys become NaN": Fault("_softmax", "gl.where(_, 0.0, a_)", "a_"),
    "blocks without a mask are counted one too many": Fault(
        "key_blocks", "gl.minimum(a_ // b_, c_)", "gl.minimum(a_ // b_ + 1, c_)"
    ),
    "a block is left out": Fault("key_blocks", "(a_ + b_ - 1) // b_", "a_ // b_"),
    "the way back is off by one": Fault("locate", "a_ - 1 - t_", "a_ - t_"),
    "the last lap ends where tiles do": Fault("laps_end", "return _", "return p.tiles"),
    "a packed sequence runs into the next": Fault(
        "load_rows", "[w_, s_ + n_, w_ - (n_ - r_), ...]", "[w_, s_ + n_ + 1, w_ - (n_ + 1 - r_), ...]"
    ),
}
_FREED = "mbarrier.arrive(_.a_empty.index(_), ...)"
_CONSUMERS = "_dkdv_consumer|_dq_consumer"
BACKWARD = {
    "Q is used before it is there": Fault("_queue_dkdv", "mbarrier.wait(_.a_full.index(_), _)"),
    "dO is used before it is there": Fault("_queue_dkdv", "mbarrier.wait(_.b_full.index(_), _)"),
    "V is used before it is there": Fault("_queue_dq", "mbarrier.wait(_.b_full.index(_), _)"),
    "the held rows are used before they are there": Fault(_CONSUMERS, "mbarrier.wait(...)", nth=...),
    "the held rows are given back while gradients leave": Fault(_CONSUMERS, "tma.store_wait(0)", nth=...),
    "no fence before gradients leave": Fault(_CONSUMERS, "fence_async_shared()", nth=...),
    "statistics do not count as bytes": Fault(
        "load_stage",
        "mbarrier.expect(p_.b_full.index(i_), _)",
        "mbarrier.expect(p.b_full.index(i), p.a_desc.block_type.nbytes)",
    ),
    "a stage is never freed": Fault("_dkdv_block", "mbarrier.arrive(_.b_empty.index(_), ...)"),
    "a stage is freed early": Fault("_dkdv_block", _FREED, before("warpgroup_mma_wait(...)")),
    "K is freed early": Fault("_dq_block", _FREED, before("warpgroup_mma_wait(...)")),
    "the accumulator is read early": Fault("_dkdv_block", "warpgroup_mma_wait(0, ...)", nth=0),
    "a mask is one query too wide": Fault("_queue_dkdv", "a_ <= b_", "a_ <= b_ + 1"),
    "the last block's mask is left out": Fault("_dq_consumer", "_ == 0", "False"),
    "queries are skipped": Fault("_query_blocks", "gl.maximum(a_, 0) // b_", "(gl.maximum(a_, 0) + b_ - 1) // b_"),
    "query heads are mixed up": Fault("_dkdv_producer", "h_ * p_.GROUP + _", "h_ * p_.GROUP"),
    "dK is not scaled": Fault("_dkdv_consumer", "a_ * _.scale", "a_"),
}
