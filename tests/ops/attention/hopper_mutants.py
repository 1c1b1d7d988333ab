"""Faults planted in the Hopper kernels: name -> (what stands in the source, what is put there instead)."""
# ruff: noqa: E501  (a line of a kernel is a line here)

FORWARD = {
    "V is used before it is there": (
        "    mbarrier.wait(p.v_full.index(step % p.STAGES), (step // p.STAGES) & 1)\n", "    pass\n",
    ),
    "K is used before it is there": ("    mbarrier.wait(p.k_full.index(i), (step // p.STAGES) & 1)\n", ""),
    "K is freed before its product is done": (
        "    s = warpgroup_mma_wait(1, (s,))\n    e, row_max, row_sum, factor = _weights(p, s, row_max, row_sum, n, unmasked, last_key, MASKED, s_layout)\n    _values_here(p, step)\n    o = warpgroup_mma_wait(0, (o,))\n    mbarrier.arrive(p.k_empty.index(step % p.STAGES), count=1)\n",
        "    mbarrier.arrive(p.k_empty.index(step % p.STAGES), count=1)\n    s = warpgroup_mma_wait(1, (s,))\n    e, row_max, row_sum, factor = _weights(p, s, row_max, row_sum, n, unmasked, last_key, MASKED, s_layout)\n    _values_here(p, step)\n    o = warpgroup_mma_wait(0, (o,))\n",
    ),
    "V is freed before its product is done": (
        "    o = warpgroup_mma_wait(0, (o,))\n    mbarrier.arrive(p.k_empty.index(step % p.STAGES), count=1)\n    mbarrier.arrive(p.v_empty.index((step - 1) % p.STAGES), count=1)\n",
        "    mbarrier.arrive(p.v_empty.index((step - 1) % p.STAGES), count=1)\n    o = warpgroup_mma_wait(0, (o,))\n    mbarrier.arrive(p.k_empty.index(step % p.STAGES), count=1)\n",
    ),
    "O is scaled before it is there": (
        "    o = warpgroup_mma_wait(0, (o,))\n    mbarrier.arrive(p.k_empty.index(step % p.STAGES)", "    mbarrier.arrive(p.k_empty.index(step % p.STAGES)",
    ),
    "the maximum's change is forgotten": ("return row_sum * gl.expand_dims(factor, 1) + own", "return row_sum + own"),
    "a block on the diagonal goes without a mask": ("k_len - q_len - p.BLOCK_N + 2)", "k_len - q_len + 2)"),
    "the producer starts on the wrong phase": ("mbarrier.wait(empty.index(i), ((step // p.STAGES) & 1) ^ 1)", "mbarrier.wait(empty.index(i), (step // p.STAGES) & 1)"),
    "Q's buffer is given back while O leaves": (
        "                    tma.store_wait(0)\n                    mbarrier.arrive(p.q_empty", "                    mbarrier.arrive(p.q_empty",
    ),
    "no fence before O leaves": ("    fence_async_shared()\n    store_rows", "    store_rows"),
    "a mask is one key too wide": ("<= gl.expand_dims(last_key, 1)", "<= gl.expand_dims(last_key, 1) + 1"),
    "rows without keys become NaN": ('shift = gl.where(new_max == float("-inf"), 0.0, new_max * p.scale_log2)', "shift = new_max * p.scale_log2"),
    "blocks without a mask are counted one too many": ("gl.minimum(full // BLOCK, blocks - 1)", "gl.minimum(full // BLOCK + 1, blocks - 1)"),
    "a block is left out": ("gl.maximum((last + BLOCK - 1) // BLOCK, 1)", "gl.maximum(last // BLOCK, 1)"),
    "the way back is off by one": ("(2 * lap + 1) * programs - 1 - t, t)", "(2 * lap + 1) * programs - t, t)"),
    "the last lap ends where tiles do": ("return (p.tiles + programs - 1) // programs * programs", "return p.tiles"),
    "a packed sequence runs into the next": ("at = [_WRAP, start + length, _WRAP - (length - row), head, 0]\n        tma_load(", "at = [_WRAP, start + length + 1, _WRAP - (length + 1 - row), head, 0]\n        tma_load("),
}  # fmt: skip
BACKWARD = {
    "Q is used before it is there": (
        "    mbarrier.wait(p.a_full.index(i), phase)\n    mbarrier.wait(p.b_full.index(i), phase)\n",
        "    mbarrier.wait(p.b_full.index(i), phase)\n",
    ),
    "dO is used before it is there": (
        "    mbarrier.wait(p.a_full.index(i), phase)\n    mbarrier.wait(p.b_full.index(i), phase)\n",
        "    mbarrier.wait(p.a_full.index(i), phase)\n",
    ),
    "V is used before it is there": ("    mbarrier.wait(p.b_full.index(i), phase)\n    v = ", "    v = "),
    "the held rows are used before they are there": ("            mbarrier.wait(p.held_full.index(at), (tile // p.SLOTS) & 1)\n", ""),
    "the held rows are given back while gradients leave": (
        "            tma.store_wait(0)\n            mbarrier.arrive(p.held_empty", "            mbarrier.arrive(p.held_empty",
    ),
    "no fence before gradients leave": ("            fence_async_shared()\n", ""),
    "statistics do not count as bytes": ("A_BYTES + STAT_BYTES)\n        load_rows(p.b", "A_BYTES)\n        load_rows(p.b"),
    "a stage is never freed": ("    mbarrier.arrive(p.b_empty.index(i), count=1)\n    return s, dp, dk, dv", "    return s, dp, dk, dv"),
    "a stage is freed early": (
        "        dk, dv = warpgroup_mma_wait(2, (dk, dv))\n    else:\n        dk, dv = warpgroup_mma_wait(0, (dk, dv))\n    mbarrier.arrive(p.a_empty.index(i), count=1)\n",
        "        mbarrier.arrive(p.a_empty.index(i), count=1)\n        dk, dv = warpgroup_mma_wait(2, (dk, dv))\n    else:\n        mbarrier.arrive(p.a_empty.index(i), count=1)\n        dk, dv = warpgroup_mma_wait(0, (dk, dv))\n",
    ),
    "K is freed early": (
        "        dq = warpgroup_mma_wait(2, (dq,))\n    else:\n        dq = warpgroup_mma_wait(0, (dq,))\n    mbarrier.arrive(p.a_empty.index(i), count=1)\n",
        "        mbarrier.arrive(p.a_empty.index(i), count=1)\n        dq = warpgroup_mma_wait(2, (dq,))\n    else:\n        mbarrier.arrive(p.a_empty.index(i), count=1)\n        dq = warpgroup_mma_wait(0, (dq,))\n",
    ),
    "the accumulator is read early": ("        s, dp = warpgroup_mma_wait(0, (s, dp))\n    else:\n        s, dp = _queue_dkdv", "        pass\n    else:\n        s, dp = _queue_dkdv"),
    "a mask is one query too wide": ("<= gl.expand_dims(last_key, 0), lse", "<= gl.expand_dims(last_key, 0) + 1, lse"),
    "the last block's mask is left out": ("dq, lse, delta, 0, full == 0, last_key", "dq, lse, delta, 0, False, last_key"),
    "queries are skipped": ("first = gl.minimum(gl.maximum(n - (k_len - q_len), 0) // p.BLOCK, end)", "first = gl.minimum((gl.maximum(n - (k_len - q_len), 0) + p.BLOCK - 1) // p.BLOCK, end)"),
    "query heads are mixed up": ("head = kv_head * p.GROUP + g", "head = kv_head * p.GROUP"),
    "dK is not scaled": ("(dk * p.scale).to", "dk.to"),
}  # fmt: skip
