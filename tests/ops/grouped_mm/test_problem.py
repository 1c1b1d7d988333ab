import subprocess
import sys

import pytest
import torch

from expertile.ops.grouped_mm.problem import Layout, Problem
from expertile.ragged import offs_from_sizes

A2, A3 = torch.zeros(10, 8), torch.zeros(3, 10, 8)
B2, B3 = torch.zeros(8, 6), torch.zeros(3, 8, 6)
OFFS = offs_from_sizes([4, 0, 5])


def problem(a, b, offs=None, **kwargs):
    return Problem.from_tensors(a.bfloat16(), b.bfloat16(), offs, **kwargs)


@pytest.mark.parametrize(
    "a, b, offs, layout, shape",
    [
        (A2, B3, OFFS, Layout.RAGGED_M, (10, 6)),
        (A2, B2, OFFS[:2], Layout.RAGGED_K, (2, 10, 6)),
        (A3, torch.zeros(8, 12), OFFS, Layout.RAGGED_N, (10, 12)),
        (A3, B3, None, Layout.BATCHED, (3, 10, 6)),
    ],
)
def test_layouts_and_shapes(a, b, offs, layout, shape):
    p = problem(a, b, offs)
    assert p.layout is layout and p.out_shape == shape
    assert p.out_dtype is torch.bfloat16 and p.device_type == "cpu"
    assert hash(p) == hash(problem(a, b, offs))


def test_flops_count_useful_rows_and_bytes_count_once():
    p = problem(A2, B3, OFFS)
    assert p.group_sizes == (4, 0, 5)
    work = p.work()
    assert work.flops == 2 * 9 * 8 * 6
    # 9 rows of a, the weights of the two groups in use, 9 rows of out; 2 bytes each.
    assert work.nbytes == 2 * (9 * 8 + 2 * 8 * 6 + 9 * 6)
    assert p.with_sizes(None).work().flops == 2 * 10 * 8 * 6


def test_wgrad_work_writes_every_group():
    p = problem(torch.zeros(6, 10), torch.zeros(10, 8), OFFS)
    assert p.work().flops == 2 * 9 * 6 * 8
    assert p.work().nbytes == 2 * (9 * (6 + 8) + 3 * 6 * 8)


def test_ragged_n_work_mirrors_ragged_m():
    p = problem(A3, torch.zeros(8, 12), OFFS)
    assert p.work().flops == 2 * 9 * 10 * 8
    assert p.work().nbytes == 2 * (9 * 8 + 2 * 8 * 10 + 9 * 10)


def test_out_dtype_sets_the_bytes_of_out():
    wide = problem(A3, B3, out_dtype=torch.float32)
    assert wide.work().nbytes - problem(A3, B3).work().nbytes == 2 * 3 * 10 * 6


BF = torch.bfloat16
BAD = [
    (dict(a=A2[0], b=B3), r"a, b: expected 2 or 3 dimensions each, got a \[8\]"),
    (dict(a=A2.int(), b=B3), r"a: expected dtype .*bfloat16.*, got torch.int32"),
    (dict(a=A2, b=B3.to(BF)), r"b: expected dtype torch.float32 as a has, got torch.bfloat16"),
    (dict(a=A2, b=B3.to("meta")), r"b: expected device cpu as a has, got meta"),
    (dict(a=A2, b=B3, out_dtype=torch.int8), r"out_dtype: expected .*, got torch.int8"),
    (dict(a=A2, b=torch.zeros(3, 7, 6)), r"b: expected 8 rows \(a's last dimension\), got 7"),
    (dict(a=A3, b=torch.zeros(4, 8, 6)), r"b: expected 3 groups as a has, got 4"),
    (dict(a=A3, b=B3, offs=OFFS), r"offs: expected None when a and b both have a group dimension"),
    (dict(a=A2, b=B3), r"offs: expected an int32 tensor .*, got None"),
    (dict(a=A2, b=B3, offs=[4, 4, 9]), r"offs: expected an int32 tensor, got list"),
    (dict(a=A2, b=B3, offs=OFFS.long()), r"offs: expected dtype torch.int32, got torch.int64"),
    (dict(a=A2, b=B3, offs=OFFS[None]), r"offs: expected 1 dimension, got shape \[1, 3\]"),
    (dict(a=A2, b=B3, offs=OFFS.to("meta")), r"offs: expected device cpu as a has, got meta"),
    (dict(a=A2, b=B3, offs=OFFS[:2]), r"offs: expected length 3 \(the groups of b\), got 2"),
    (dict(a=A3, b=B2, offs=OFFS[:2]), r"offs: expected length 3 \(the groups of a\), got 2"),
    (dict(a=A2, b=B2, offs=OFFS[:0]), r"offs: expected at least one group, got length 0"),
    (dict(a=A2, b=B3, offs=OFFS, bias=torch.zeros(6)), r"bias: expected shape \[3, 6\] .*, got \[6\]"),
    (dict(a=A2, b=B3, offs=OFFS, bias=torch.zeros(3, 6).int()), r"bias: expected dtype .*, got torch.int32"),
    (dict(a=A3, b=B2, offs=OFFS, bias=torch.zeros(3, 6)), r"bias: expected None unless a's rows are grouped"),
    (dict(a=A2, b=B2, offs=OFFS, bias=torch.zeros(3, 6)), r"bias: expected None unless a's rows are grouped"),
]


@pytest.mark.parametrize("arguments, message", BAD, ids=[m[:40] for _, m in BAD])
def test_bad_input_names_argument_expected_and_got(arguments, message):
    with pytest.raises(ValueError, match=message):
        Problem.from_tensors(**arguments)


@pytest.mark.parametrize(
    "ends, message",
    [
        ([4, 3, 9], "offs: expected ends that never decrease.*an end 1 before the previous one at group 1"),
        ([-1, 3, 9], "offs: expected ends that never decrease.*a negative end at group 0"),
        ([4, 8, 11], r"offs: expected a last end of at most 10 .*, got 11"),
    ],
)
def test_offs_values_are_checked_on_request(ends, message):
    with pytest.raises(ValueError, match=message):
        problem(A2, B3, torch.tensor(ends, dtype=torch.int32), check=True)


@pytest.mark.parametrize("switch, off, on", [("allow_tf32", False, True), ("fp32_precision", "ieee", "tf32")])
def test_tf32_only_when_torch_allows_it_by_either_switch(switch, off, on):
    # In a process of its own: once the newer switch has been used, torch lets nobody read the older one.
    code = f"""
import torch
from expertile.ops.grouped_mm.problem import Problem
from tests.ops.grouped_mm.reference import reference
a, b, offs = torch.ones(10, 8), torch.ones(2, 8, 4), torch.tensor([4, 10], dtype=torch.int32)
matmul = torch.backends.cuda.matmul
matmul.{switch} = {off!r}
assert Problem.from_tensors(a, b, offs).dtype_key == "fp32"
matmul.{switch} = {on!r}
assert Problem.from_tensors(a, b, offs).dtype_key == "tf32"
assert Problem.from_tensors(a.bfloat16(), b.bfloat16(), offs).dtype_key == "bf16"
assert reference(a, b, offs).eq(8).all()
assert matmul.{switch} == {on!r}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_misaligned_base_is_noticed():
    flat = torch.zeros(81, dtype=BF)
    assert Problem.from_tensors(flat[:80].view(10, 8), B3.to(BF), OFFS).a_aligned
    assert not Problem.from_tensors(flat[1:].view(10, 8), B3.to(BF), OFFS).a_aligned
