"""Triton kernels of the router's selection; see router.py for what they compute.

A program takes BLOCK_T tokens and all experts, laid out as GROUPS_P2 groups of SIZE_P2 places. What is chosen by is
turned into integers of the same order. Each selection takes the largest integer of a row and then the lowest place that
has it: ties go to the lower expert, whatever the machine. Among bfloat16 logits, 16 bits of the integer are left to
hold the place, and one reduction finds both.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from expertile.ops.launch.pdl import begin
from expertile.ops.launch.shape import constants

# Below the key of every number, -inf included: what can't be chosen.
NOTHING = tl.constexpr(-(2**31))
# Added to the sum that weights are divided by, lest it were zero (DeepSeek-V3's 1e-20).
TINY = tl.constexpr(1e-20)


class Shape(NamedTuple):
    """What the kernels are compiled for: the TOP_K best and, to SELECT, further ones; how weights are made of them."""

    TOP_K: int
    SELECT: int
    SELECT_P2: int
    SIGMOID: bool
    SOFTMAX_OF_CHOSEN: bool
    NORMALIZE: bool


@triton.jit
def sortable(x):
    """int32 of the same order as the float32 x: -0 is 0, and NaN above all."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, 0x7FC00000, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))


@triton.jit
def _number(key):
    """The float32 of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _first_largest(key, PLACES: tl.constexpr):
    """(largest of each row, its lowest place) of key [rows, PLACES]."""
    largest = tl.max(key, 1)
    place = tl.arange(0, PLACES)[None, :]
    return largest, tl.min(tl.where(key == largest[:, None], place, PLACES), 1)


@triton.jit
def _within_best_groups(
    key,
    BLOCK_T: tl.constexpr,
    GROUPS_P2: tl.constexpr,
    SIZE_P2: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BY_TWO: tl.constexpr,
):
    """key [BLOCK_T, GROUPS_P2 * SIZE_P2] with nothing outside the best TOP_GROUPS groups; a group is as good as its
    best expert, or as its two best together."""
    grouped = tl.reshape(key, [BLOCK_T, GROUPS_P2, SIZE_P2])
    best = tl.max(grouped, 2)
    if BY_TWO:
        place = tl.arange(0, SIZE_P2)[None, None, :]
        first = tl.min(tl.where(grouped == best[:, :, None], place, SIZE_P2), 2)
        second = tl.max(tl.where(place == first[:, :, None], NOTHING, grouped), 2)
        # Groups that are only padding have no numbers.
        best = tl.where(best == NOTHING, NOTHING, sortable(_number(best) + _number(second)))
    chosen = tl.zeros([BLOCK_T, GROUPS_P2], tl.int32)
    group = tl.arange(0, GROUPS_P2)[None, :]
    for _ in tl.static_range(TOP_GROUPS):
        _, place = _first_largest(best, GROUPS_P2)
        hit = group == place[:, None]
        chosen = tl.where(hit, 1, chosen)
        best = tl.where(hit, NOTHING, best)
    return tl.reshape(tl.where(chosen[:, :, None] == 1, grouped, NOTHING), [BLOCK_T, GROUPS_P2 * SIZE_P2])


@triton.jit
def _load_row(logits_ptr, token, stride, experts, size, T, GROUPS_P2: tl.constexpr, SIZE_P2: tl.constexpr):
    """(expert of each place, whether there is one, logits as float32: -inf where there is none)."""
    place = tl.arange(0, GROUPS_P2 * SIZE_P2)
    expert = place // SIZE_P2 * size + place % SIZE_P2
    there = ((place % SIZE_P2 < size) & (expert < experts))[None, :] & (token < T)[:, None]
    logits = tl.load(
        logits_ptr + token.to(tl.int64)[:, None] * stride + expert[None, :], mask=there, other=float("-inf")
    ).to(tl.float32)
    return expert, there, logits


@triton.jit
def _scores(logits, SIGMOID: tl.constexpr):
    """(scores, their maximum logit, the sum of exponentials) of each row; the last two for softmax only."""
    if SIGMOID:
        return 1.0 / (1.0 + tl.exp(-logits)), 0.0, 1.0
    else:
        peak = tl.max(logits, 1)
        powers = tl.exp(logits - peak[:, None])
        total = tl.sum(powers, 1)
        return powers / total[:, None], peak, total


@triton.jit
def _raw_weights(chosen, peak, total, inside, counted, s):
    """Weights before normalisation of chosen logits [BLOCK_T, SELECT_P2]; `counted` are the first top_k of them."""
    if s.SIGMOID:
        raw = 1.0 / (1.0 + tl.exp(-chosen))
    elif s.SOFTMAX_OF_CHOSEN:
        best = tl.max(tl.where(counted, chosen, float("-inf")), 1)
        powers = tl.exp(chosen - best[:, None])
        raw = powers / tl.sum(tl.where(counted, powers, 0.0), 1)[:, None]
    else:
        raw = tl.exp(chosen - peak[:, None]) / total[:, None]
    return tl.where(inside, raw, 0.0)


@triton.jit
def route_kernel(
    tensors,
    scalars,
    SHAPE: tl.constexpr,
    GROUPS_P2: tl.constexpr,
    SIZE_P2: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BY_TWO: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    PDL: tl.constexpr,
):
    """PACKED: the keys' lower 16 bits tell nothing apart, and stand for the place. PDL: launched before the kernel
    before it is done."""
    logits_ptr, bias_ptr, ids_ptr, weights_ptr, scores_ptr = tensors
    T, stride, experts, size, scale = scalars
    begin(PDL)
    s: tl.constexpr = constants(Shape, SHAPE)
    PLACES: tl.constexpr = GROUPS_P2 * SIZE_P2
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert, there, logits = _load_row(logits_ptr, token, stride, experts, size, T, GROUPS_P2, SIZE_P2)
    scores, peak, total = _scores(logits, s.SIGMOID)
    if scores_ptr is not None:
        tl.store(scores_ptr + token.to(tl.int64)[:, None] * experts + expert[None, :], scores, mask=there)
    choice = logits
    if bias_ptr is not None:
        choice = scores + tl.load(bias_ptr + expert, mask=expert < experts, other=0.0).to(tl.float32)[None, :]
    elif BY_TWO:
        choice = scores  # sums of two logits would order groups differently
    key = tl.where(there, sortable(choice), NOTHING)
    if TOP_GROUPS > 0:
        key = _within_best_groups(key, BLOCK_T, GROUPS_P2, SIZE_P2, TOP_GROUPS, BY_TWO)
    place = tl.arange(0, PLACES)[None, :]
    if PACKED:
        key = (key & -65536) | (PLACES - 1 - place)
    j = tl.arange(0, s.SELECT_P2)[None, :]
    ids = tl.zeros([BLOCK_T, s.SELECT_P2], tl.int32)
    for i in tl.static_range(s.SELECT):
        if PACKED:
            largest = tl.max(key, 1)
            best = PLACES - 1 - (largest & 65535)
            key = tl.where(key == largest[:, None], NOTHING, key)
        else:
            _, best = _first_largest(key, PLACES)
            key = tl.where(place == best[:, None], NOTHING, key)
        ids = tl.where(j == i, (best // SIZE_P2 * size + best % SIZE_P2)[:, None], ids)
    inside = (j < s.SELECT) & (token < T)[:, None]
    chosen = tl.load(logits_ptr + token.to(tl.int64)[:, None] * stride + ids, mask=inside, other=0.0).to(tl.float32)
    counted = inside & (j < s.TOP_K)
    weights = _raw_weights(chosen, peak, total, inside, counted, s)
    if s.NORMALIZE:
        weights = weights / (tl.sum(tl.where(counted, weights, 0.0), 1) + TINY)[:, None]
    slot = token.to(tl.int64)[:, None] * s.SELECT + j
    tl.store(ids_ptr + slot, ids, mask=inside)
    tl.store(weights_ptr + slot, weights * scale, mask=inside)


@triton.jit
def _of_scores(dscores, scores, shared, SIGMOID: tl.constexpr):
    """The logits' gradient from that of their scores; `shared` is <dscores, scores> of a token, for softmax."""
    return dscores * scores * (1.0 - scores) if SIGMOID else scores * (dscores - shared)


@triton.jit
def route_backward_kernel(tensors, scalars, SHAPE: tl.constexpr, EXPERTS_P2: tl.constexpr, BLOCK_T: tl.constexpr):
    """dlogits from the gradients of the weights and of the scores, either of which may be None."""
    logits_ptr, ids_ptr, dweights_ptr, dscores_ptr, dlogits_ptr = tensors
    T, stride, experts, scale = scalars
    s: tl.constexpr = constants(Shape, SHAPE)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert, there, logits = _load_row(logits_ptr, token, stride, experts, experts, T, 1, EXPERTS_P2)
    scores, peak, total = _scores(logits, s.SIGMOID)
    row = token.to(tl.int64)[:, None]
    dscores = tl.zeros([BLOCK_T, EXPERTS_P2], tl.float32)
    shared = tl.zeros([BLOCK_T], tl.float32)  # <dscores, scores> of a softmax, what the chosen add included
    if dscores_ptr is not None:
        dscores = tl.load(dscores_ptr + row * experts + expert[None, :], mask=there, other=0.0).to(tl.float32)
        if not s.SIGMOID:
            shared = tl.sum(dscores * scores, 1)
    if dweights_ptr is not None:
        j = tl.arange(0, s.SELECT_P2)[None, :]
        inside = (j < s.SELECT) & (token < T)[:, None]
        counted = inside & (j < s.TOP_K)
        ids = tl.load(ids_ptr + row * s.SELECT + j, mask=inside, other=0)
        grad = tl.load(dweights_ptr + row * s.SELECT + j, mask=inside, other=0.0).to(tl.float32) * scale
        chosen = tl.load(logits_ptr + row * stride + ids, mask=inside, other=0.0).to(tl.float32)
        raw = _raw_weights(chosen, peak, total, inside, counted, s)
        if s.NORMALIZE:
            below = (tl.sum(tl.where(counted, raw, 0.0), 1) + TINY)[:, None]
            mean = tl.sum(grad * raw, 1)[:, None] / below
            grad = tl.where(inside, grad - tl.where(counted, mean, 0.0), 0.0) / below
        if s.SOFTMAX_OF_CHOSEN and not s.SIGMOID:
            # Only the counted logits are in the denominator; all chosen ones have a numerator.
            mean = tl.sum(grad * raw, 1)[:, None]
            grad = raw * (grad - tl.where(counted, mean, 0.0))
        elif not s.SIGMOID:
            shared += tl.sum(grad * raw, 1)
    target = dlogits_ptr + row * experts
    tl.store(target + expert[None, :], _of_scores(dscores, scores, shared[:, None], s.SIGMOID), mask=there)
    if dweights_ptr is not None:
        # The few that were chosen are written once more, with their weight's gradient.
        own = tl.zeros([BLOCK_T, s.SELECT_P2], tl.float32)
        if dscores_ptr is not None:
            own = tl.load(dscores_ptr + row * experts + ids, mask=inside, other=0.0).to(tl.float32)
        if s.SOFTMAX_OF_CHOSEN and not s.SIGMOID:
            score = tl.exp(chosen - peak[:, None]) / total[:, None]
            dchosen = _of_scores(own, score, shared[:, None], s.SIGMOID) + grad
        else:
            dchosen = _of_scores(own + grad, raw, shared[:, None], s.SIGMOID)
        tl.debug_barrier()
        tl.store(target + ids, dchosen, mask=inside)
