"""cuBLAS's arguments, executed for real: a stand-in for `gemm_grouped_batched_ex` reads the arrays through their
addresses, checks what cuBLAS's documentation demands of them and computes the column-major products in memory."""

import ctypes
from dataclasses import replace

import pytest
import torch

from expertile.device import Device
from expertile.ops.backend import NoConfig
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.backends import cublas_grouped
from expertile.ops.grouped_mm.problem import Layout, Problem
from tests.ops.grouped_mm.cases import CASES, check, expected, make, poisoned_out

BACKEND = cublas_grouped.BACKEND
H200 = Device.by_name("h200")
BF16 = torch.bfloat16
DTYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16}


def memory(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype=dtype)


def ints(address: int, count: int) -> list[int]:
    return memory(address, count, torch.int32).tolist()


def column_major(address: int, rows: int, cols: int, ld: int, dtype: torch.dtype) -> torch.Tensor:
    return memory(address, ld * (cols - 1) + rows, dtype).as_strided((rows, cols), (1, ld))


class ColumnMajorBlas:
    """What cublasGemmGroupedBatchedEx does, by its documentation, on host memory."""

    def __init__(self) -> None:
        self.problems = 0
        self.compute_types: set[int] = set()

    def gemm_grouped_batched_ex(
        self,
        handle,
        transa,
        transb,
        m,
        n,
        k,
        alpha,
        a,
        a_type,
        lda,
        b,
        b_type,
        ldb,
        beta,
        c,
        c_type,
        ldc,
        group_count,
        group_size,
        compute_type,
    ):
        assert a_type == b_type == c_type
        dtype = DTYPES[a_type]
        assert ints(group_size, group_count) == [1] * group_count
        scales = [memory(p, group_count, torch.float32).tolist() for p in (alpha, beta)]
        sizes = [ints(p, group_count) for p in (transa, transb, m, n, k, lda, ldb, ldc)]
        addresses = [memory(p, group_count, torch.int64).tolist() for p in (a, b, c)]
        for args in zip(*sizes, *scales, *addresses, strict=True):
            self.one(dtype, compute_type, *args)
        self.problems += group_count
        self.compute_types.add(compute_type)

    def one(self, dtype, compute_type, ta, tb, m, n, k, lda, ldb, ldc, alpha, beta, a, b, c):
        assert m > 0 and n > 0 and k > 0 and ta in (0, 1) and tb in (0, 1)
        assert lda >= (k if ta else m) and ldb >= (n if tb else k) and ldc >= m
        if dtype.itemsize == 2 or compute_type == 77:
            needed = next((x for x in (16, 4) if k * dtype.itemsize % x == 0), 1)
            assert a % needed == b % needed == c % needed == 0
        left = column_major(a, k, m, lda, dtype).T if ta else column_major(a, m, k, lda, dtype)
        right = column_major(b, n, k, ldb, dtype).T if tb else column_major(b, k, n, ldb, dtype)
        result = column_major(c, m, n, ldc, dtype)
        assert beta == 0.0
        result.copy_(alpha * (left.float() @ right.float()))


@pytest.fixture
def blas(monkeypatch):
    fake = ColumnMajorBlas()

    def launch(problem, plan, operands, out):
        cublas_grouped._call(fake, 0, problem, plan, cublas_grouped._addresses(plan, operands, out))

    monkeypatch.setattr(cublas_grouped, "_launch", launch)
    monkeypatch.setattr(cublas_grouped, "find_spec", lambda name: object())
    return fake


@pytest.mark.parametrize("sizes_known", [True, False])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_case(case, sizes_known, blas):
    a, b, offs, bias = make(case)
    problem = Problem.from_tensors(a, b, offs, bias, case.out_dtype)
    if not sizes_known:
        problem = problem.with_sizes(None)
    reason = BACKEND.supports(problem, H200)
    if reason is not None:
        pytest.skip(reason)
    out = poisoned_out(case)
    assert BACKEND.run(problem, Operands(a, b, offs, bias), NoConfig(), out) is out
    check(case, out, expected(case, a, b, offs, bias))
    if problem.k and problem.layout is not Layout.BATCHED:
        assert blas.problems == sum(s > 0 for s in case.sizes)


def test_tf32_is_asked_for_where_allowed(blas):
    case = next(c for c in CASES if c.name == "m-fp32")
    a, b, offs, _ = make(case)
    problem = replace(Problem.from_tensors(a, b, offs), allow_tf32=True)
    BACKEND.run(problem, Operands(a, b, offs), NoConfig(), None)
    assert blas.compute_types == {77}


def test_a_repeated_call_reuses_its_addresses(blas):
    addresses = cublas_grouped._Addresses(capacity=2)
    a, b, offs, _ = make(CASES[0])
    problem = Problem.from_tensors(a, b, offs)
    plan = cublas_grouped._plan(problem, problem.group_sizes, (problem.n, 1), a.device)
    first = addresses.of(plan, 1, 1000)
    assert addresses.of(plan, 1, 1000) is first
    assert (first - plan.offsets[1]).tolist() == [1000] * 3
    for operand in (0, 2):
        assert torch.equal(addresses.of(plan, operand, 1000), plan.offsets[operand] + 1000)
    assert len(addresses.recent) == 2
    assert addresses.of(plan, 1, 1000) is not first, "the oldest entry was dropped"


PLAIN = Problem(Layout.RAGGED_M, 4, 100, 64, 128, BF16, BF16, (128, 1), (64 * 128, 1, 128))
WGRAD = Problem(Layout.RAGGED_K, 4, 64, 32, 100, BF16, BF16, (1, 64), (32, 1))
RAGGED_N = Problem(Layout.RAGGED_N, 4, 64, 64, 128, BF16, BF16, (64 * 128, 128, 1), (1, 128))
FP32 = {"dtype": torch.float32, "out_dtype": torch.float32}


@pytest.mark.parametrize(
    "problem, device, reason",
    [
        (PLAIN, H200, None),
        (WGRAD, H200, None),
        (PLAIN, Device.by_name("a100"), None),
        (PLAIN, Device.by_name("v100"), "bfloat16 needs sm_80"),
        (replace(PLAIN, dtype=torch.float16, out_dtype=torch.float16), Device.by_name("v100"), None),
        (PLAIN, Device.current("cpu"), "needs a CUDA GPU"),
        (replace(PLAIN, has_bias=True), H200, "no bias"),
        (replace(PLAIN, out_dtype=torch.float32), H200, "out_dtype must be"),
        (replace(PLAIN, a_strides=(256, 2)), H200, "a: rows or columns must be contiguous"),
        (replace(PLAIN, b_strides=(0, 0, 0)), H200, "b: rows or columns must be contiguous"),
        (replace(PLAIN, a_strides=(0, 1)), H200, "a: rows or columns must be contiguous"),
        # addresses: k * 2 bytes is a multiple of 16, so every group must begin on one
        (replace(PLAIN, a_aligned=False), H200, "a: group 0 must begin on a multiple of 16 bytes"),
        (replace(PLAIN, b_aligned=False), H200, "b: group 0"),
        (replace(PLAIN, a_strides=(129, 1)), H200, "a: group 1 must begin on a multiple of 16 bytes whatever"),
        (replace(PLAIN, a_strides=(129, 1), group_sizes=(8, 16, 72, 4)), H200, None),
        (replace(PLAIN, n=61, b_strides=(61 * 128, 1, 128)), H200, "out: group 1"),
        # k * 2 bytes is no multiple of 4: any address will do
        (replace(PLAIN, k=51, a_strides=(51, 1), b_strides=(64 * 51, 1, 51), a_aligned=False), H200, None),
        # groups side by side along contiguous elements
        (RAGGED_N, H200, "out: group 1"),
        (replace(RAGGED_N, group_sizes=(8, 0, 40, 3)), H200, None),
        (replace(WGRAD, a_strides=(104, 1)), H200, "a: group 1"),
        (
            replace(WGRAD, a_strides=(104, 1), group_sizes=(3, 4, 9, 3)),
            H200,
            "a: group 1 must begin on a multiple of 4 bytes",
        ),
        # float32 has no such rule unless it becomes TF32
        (replace(PLAIN, n=61, b_strides=(61 * 128, 1, 128), **FP32), H200, None),
        (replace(PLAIN, n=61, b_strides=(61 * 128, 1, 128), allow_tf32=True, **FP32), H200, "out: group 1"),
    ],
)
def test_supports(problem, device, reason, blas):
    got = BACKEND.supports(problem, device)
    assert got is None if reason is None else got is not None and reason in got, got


def test_says_what_to_install(monkeypatch):
    monkeypatch.setattr(cublas_grouped, "find_spec", lambda name: None)
    assert "nvmath-python" in BACKEND.supports(PLAIN, H200)


def test_bindings_take_the_arguments_as_they_are_given():
    cublas = pytest.importorskip("nvmath.bindings.cublas")
    names = cublas.gemm_grouped_batched_ex.__doc__.split("(", 1)[1].split(")")[0].split(", ")
    assert " ".join(n.split()[-1] for n in names) == (
        "handle transa_array transb_array m_array n_array k_array alpha_array aarray atype lda_array barray btype "
        "ldb_array beta_array carray ctype ldc_array group_count group_size compute_type"
    )
    assert (cublas.ComputeType.COMPUTE_32F, cublas.ComputeType.COMPUTE_32F_FAST_TF32) == (68, 77)
    assert (cublas.Operation.N, cublas.Operation.T) == (0, 1)
