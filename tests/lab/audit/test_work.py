import pytest

from expertile.lab.audit.dims import shapes_in
from expertile.lab.audit.work import readings, rows_and_columns


def _flops(operation, dims=None, shape="", itemsize=2.0):
    found = readings(operation, dims or {}, shapes_in(shape), itemsize)
    assert not isinstance(found, str), found
    return [r.flops for r in found]


def test_matrix_products():
    assert _flops("gemm", shape="16x32x64") == [2 * 16 * 32 * 64]
    assert _flops("gemm", shape="4 GEMMs (512×512)") == [4 * 2 * 512**3]
    assert _flops("gemm", {"m": 2, "n": 3, "k": 5}) == [60]
    assert _flops("gemm", {"groups": 8, "m": 2, "n": 3, "k": 5}) == [480, 60]
    assert _flops("gemm", shape="(64, 32) @ (32, 16)") == [2 * 64 * 32 * 16]


def test_a_third_size_stated_elsewhere_comes_before_the_square_guess():
    assert _flops("gemm", {"m": 128}, "4096×4096") == [2 * 128 * 4096**2, 2 * 4096**3]


def test_two_unequal_sizes_say_nothing_of_the_third():
    assert isinstance(readings("gemm", {}, shapes_in("4096×1024"), 2.0), str)


def test_moe_has_a_reading_for_each_count_of_products_and_experts_per_token():
    dims = {"groups": 8, "hidden": 4, "ffn": 6, "batch": 2, "seq": 5, "topk": 2}
    assert _flops("moe", dims) == [2 * 20 * 24 * p for p in (1, 2, 3)]
    bare = _flops("moe", {"groups": 8, "hidden": 4, "ffn": 6, "tokens": 10, "topk": 2})
    assert min(bare) == 2 * 10 * 24


def test_attention_may_be_causal():
    dims = {"batch": 4, "heads": 8, "seq": 1024, "head_dim": 64}
    assert _flops("attention", dims) == [4 * 4 * 8 * 1024**2 * 64, 2 * 4 * 8 * 1024**2 * 64]
    assert "heads missing" in readings("attention", {"batch": 1, "seq": 8, "head_dim": 4}, (), 2.0)


@pytest.mark.parametrize(
    ("operation", "nbytes"),
    [("softmax", 2 * 64 * 4), ("vector_add", 3 * 64 * 4), ("copy", 2 * 64 * 4), ("reduction", 64 * 4)],
)
def test_memory_bound_operations_count_each_value_once(operation, nbytes):
    (reading,) = readings(operation, {}, shapes_in("16×4"), 4.0)
    assert (reading.flops, reading.nbytes) == (None, nbytes)


def test_a_row_length_replaces_that_of_the_shape():
    assert rows_and_columns({"hidden": 256}, shapes_in("[32 × 512 × 768]")) == (32 * 512, 256)


def test_an_operation_without_a_model_is_named():
    assert "not modelled" in readings("unsupported", {}, (), 2.0)
