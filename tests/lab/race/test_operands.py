"""Operands have the shapes, strides and sizes their workload states."""

import pytest
import torch

from expertile.lab.race.operands import free_memory, make_operands, summands
from expertile.lab.race.workloads import grouped, ragged_m, wgrad
from expertile.ops.grouped_mm.problem import Layout, Problem

CPU = torch.device("cpu")
WORKLOADS = [
    ragged_m("m", "t", (5, 0, 9), 64, 32, "bf16"),
    ragged_m("m-kn", "t", (5, 0, 9), 64, 32, "fp16", b_layout="kn"),
    wgrad("k", "t", (5, 0, 9), 16, 32, "bf16"),
    grouped("n", "t", Layout.RAGGED_N, (5, 0, 9), 16, 14, 64, "fp32"),
    grouped("b", "t", Layout.BATCHED, (6, 6), 6, 32, 64, "bf16"),
]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_operands_describe_the_workloads_problem(workload):
    o = make_operands(workload, CPU, 0)
    assert Problem.from_tensors(o.a, o.b, o.offs) == Problem.from_tensors(o.a, o.b, o.offs, check=True)
    expected = workload.problem("cpu")
    got = Problem.from_tensors(o.a, o.b, o.offs)
    assert got.with_sizes(None) == expected.with_sizes(None)
    assert got.out_shape == workload.out_shape


@pytest.mark.parametrize("workload", WORKLOADS[:4], ids=lambda w: w.name)
def test_a_tail_extends_the_ragged_dimension_only(workload):
    o = make_operands(workload, CPU, 0, tail=8)
    problem = Problem.from_tensors(o.a, o.b, o.offs, check=True)
    assert problem.ragged_total == sum(workload.group_sizes) + 8
    assert problem.group_sizes == workload.group_sizes
    assert o.a.isfinite().all() and o.b.isfinite().all()


def test_results_have_a_size_of_about_one():
    workload = ragged_m("m", "t", (256,), 4096, 64, "fp32")
    o = make_operands(workload, CPU, 0)
    assert (o.a @ o.b[0]).std().item() == pytest.approx(1.0, rel=0.1)
    assert summands(wgrad("k", "t", (100, 300), 8, 8, "bf16")) == 200


def test_sets_differ_and_seeds_repeat():
    workload = WORKLOADS[0]
    first, second = (make_operands(workload, CPU, seed) for seed in (5, 6))
    assert not torch.equal(first.a, second.a) and not torch.equal(first.b, second.b)
    assert torch.equal(make_operands(workload, CPU, 6).a, second.a)


def test_free_memory_is_known_here():
    assert free_memory(CPU) > 1 << 20
