import torch

from expertile.ops.grouped_mm.problem import Layout
from expertile.ops.scaled_grouped_mm.problem import Recipe, ScaledProblem
from expertile.ragged import offs_from_sizes

FP8 = torch.float8_e4m3fn
OFFS = offs_from_sizes([4, 0, 5])


def weights(n=136, k=200):
    return torch.zeros(3, n, k, dtype=FP8).transpose(1, 2)


def test_shapes_of_the_scales_spell_the_recipe():
    a = torch.zeros(10, 200, dtype=FP8)
    for scale_a, scale_b, recipe in (
        ((10, 2), (3, 2, 2), Recipe.BLOCK),
        ((10, 2), (3, 136, 2), Recipe.VECTOR),
        ((10,), (3, 136), Recipe.ROW),
    ):
        p = ScaledProblem.of(a, weights(), torch.zeros(scale_a), torch.zeros(scale_b), OFFS)
        assert p.recipe is recipe and p.layout is Layout.RAGGED_M and p.out_shape == (10, 136)
        assert (p.groups, p.m, p.n, p.k, p.k_blocks, p.n_blocks) == (3, 10, 136, 200, 2, 2)
        assert p.group_sizes == (4, 0, 5) and p.dtype_key == "fp8"
        assert hash(p) == hash(ScaledProblem.of(a, weights(), torch.zeros(scale_a), torch.zeros(scale_b), OFFS))


def test_ragged_k():
    a, b = torch.zeros(40, 384, dtype=FP8), torch.zeros(72, 384, dtype=FP8).t()
    offs = offs_from_sizes([128, 0, 256])
    for scale_a, scale_b, recipe in (((40, 3), (72, 3), Recipe.VECTOR), ((120,), (216,), Recipe.ROW)):
        p = ScaledProblem.of(a, b, torch.zeros(scale_a), torch.zeros(scale_b), offs)
        assert p.recipe is recipe and p.layout is Layout.RAGGED_K and p.out_shape == (3, 40, 72)


def test_work_counts_useful_rows_groups_and_scales_once():
    a = torch.zeros(10, 200, dtype=FP8)
    p = ScaledProblem.of(a, weights(), torch.zeros(10, 2), torch.zeros(3, 2, 2), OFFS)
    work = p.work()
    assert work.flops == 2 * 9 * 200 * 136
    # 9 rows of a, weights of the two groups in use, 9 rows of out in bf16; scales in four bytes
    assert work.nbytes == 9 * 200 + 2 * 200 * 136 + 2 * 9 * 136 + 4 * (9 * 2 + 2 * 2 * 2)
    unknown = p.with_sizes(None).work()
    assert unknown.nbytes == 10 * 200 + 3 * 200 * 136 + 2 * 10 * 136 + 4 * (10 * 2 + 3 * 2 * 2)
