"""Loading a user's function: both signatures, and a clear message for everything else."""

import pytest
import torch

from expertile.lab.race.candidate import candidate_name, gather, load, parse_spec
from expertile.lab.race.operands import make_operands
from expertile.lab.race.workloads import grouped, ragged_m, wgrad
from expertile.ops.backend import NoConfig
from expertile.ops.grouped_mm.backend import Operands
from expertile.ops.grouped_mm.problem import Layout, Problem

PAIRS = """
import torch
def fn(group_A, group_B):
    return [torch.matmul(a, b) for a, b in zip(group_A, group_B)]
"""
OFFS = """
import torch
def fn(a, b, offs):
    return torch.nn.functional.grouped_mm(a, b, offs=offs)
"""
KEYWORD = OFFS.replace("(a, b, offs)", "(mat_a, mat_b, *, offs=None, bias=None)").replace("mm(a, b", "mm(mat_a, mat_b")


def write(folder, text, name="kernel.py"):
    (folder / name).write_text(text)
    return f"{folder / name}:fn"


WORKLOADS = [
    ragged_m("m", "t", (5, 0, 9), 64, 32, "bf16"),
    wgrad("k", "t", (8, 0, 16), 16, 32, "bf16"),
    grouped("n", "t", Layout.RAGGED_N, (8, 0, 16), 16, 24, 64, "bf16"),
    grouped("b", "t", Layout.BATCHED, (6, 6), 6, 32, 64, "bf16"),
]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
@pytest.mark.parametrize("text", [PAIRS, OFFS, KEYWORD], ids=["pairs", "offs", "keyword"])
def test_both_signatures_compute_every_layout(tmp_path, workload, text):
    backend = load(write(tmp_path, text))
    o = make_operands(workload, "cpu", 0)
    problem = Problem.from_tensors(o.a, o.b, o.offs)
    out = torch.full(problem.out_shape, torch.nan, dtype=problem.out_dtype)
    assert backend.run(problem, o, NoConfig(), out) is out
    expected = torch.nn.functional.grouped_mm(o.a, o.b, offs=o.offs)
    assert torch.allclose(out.float(), expected.float(), atol=0.02)
    own = backend.run(problem.with_sizes(None), o, NoConfig(), None)
    again = gather(own, problem, o, torch.empty_like(out))
    assert torch.equal(again, out)
    assert backend.reads_offs_on_host == (text is PAIRS)


def test_name_and_spec(tmp_path):
    spec = write(tmp_path, PAIRS)
    assert candidate_name(spec) == "kernel.py:fn"
    assert parse_spec(spec) == (tmp_path / "kernel.py", "fn")
    for bad in ("kernel.py", ":fn", "kernel.py:", "kernel.py:a b"):
        with pytest.raises(ValueError, match="candidate: expected FILE.py:FUNCTION"):
            parse_spec(bad)
    with pytest.raises(ValueError, match="candidate: no file"):
        parse_spec(f"{tmp_path}/absent.py:fn")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = 1\nraise KeyError('arch')", r"importing kernel.py failed at line 2: KeyError: 'arch'"),
        ("import not_there_at_all", r"failed at line 1: ModuleNotFoundError"),
        ("def fn(:\n", r"failed at line 1: SyntaxError"),
        ("import sys\nsys.exit(3)", r"failed at line 2: SystemExit: 3"),
        ("def other(a, b):\n    pass", r"has no 'fn'; its functions: other"),
        ("fn = 3", r"'fn' in kernel.py is a int, not a function"),
        ("def fn(a):\n    pass", r"expected fn\(a, b, offs\) -> out, or .*; got kernel.py:fn\(a\)"),
        ("def fn(a, b, c, d):\n    pass", r"got kernel.py:fn\(a, b, c, d\)"),
        ("def fn(a, b, *, scale):\n    pass", r"got kernel.py:fn\(a, b, \*, scale\)"),
        ("import triton\n@triton.jit\ndef fn(x):\n    pass", r"is a Triton kernel; name the Python function"),
    ],
)
def test_messages_for_the_author(tmp_path, text, says):
    with pytest.raises(ValueError, match=says):
        load(write(tmp_path, text))


def test_a_file_may_import_its_neighbour(tmp_path):
    (tmp_path / "neighbour_of_kernel.py").write_text("import torch\nmm = torch.matmul\n")
    spec = write(
        tmp_path, PAIRS.replace("import torch", "from neighbour_of_kernel import mm").replace("torch.matmul", "mm")
    )
    assert load(spec).name == "kernel.py:fn"


class Lazy(torch.Tensor):
    """Stands for one that computes when it is read."""


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, "expected a tensor or a list of tensors, got NoneType"),
        ([torch.zeros(5, 32)], "expected 2 products, one per group with rows, got 1"),
        ([torch.zeros(5, 32), 3], r"result\[0\]: expected dtype torch.bfloat16, got torch.float32"),
        (
            [torch.zeros(5, 32).bfloat16(), torch.zeros(9, 31).bfloat16()],
            r"result\[1\]: expected shape \[9, 32\], got \[9, 31\]",
        ),
        ([torch.zeros(5, 32).bfloat16(), 3], r"result\[1\]: expected a tensor, got int"),
        (torch.zeros(13, 32).bfloat16(), r"result: expected shape \[14, 32\], got \[13, 32\]"),
        (torch.zeros(14, 32), "result: expected dtype torch.bfloat16"),
        (torch.zeros(14, 32).as_subclass(Lazy), "result: expected a torch.Tensor, got its subclass Lazy"),
    ],
)
def test_wrong_results_are_explained(result, says):
    o = make_operands(WORKLOADS[0], "cpu", 0)
    problem = Problem.from_tensors(o.a, o.b, o.offs)
    out = torch.empty(problem.out_shape, dtype=problem.out_dtype)
    with pytest.raises(ValueError, match=says):
        gather(result, problem, o, out)


def test_what_a_candidate_prints_is_cut(tmp_path, capsys):
    (tmp_path / "loud.py").write_text("def fn(a, b, offs):\n    print('again', offs)\n")
    loud = load(f"{tmp_path / 'loud.py'}:fn")
    for turn in range(50):
        loud.run(None, Operands(a=None, b=None, offs=turn), None, None)
    lines = capsys.readouterr().out.splitlines()
    assert lines == [*(f"again {turn}" for turn in range(4)), "(loud.py: what it prints from here on is cut)"]
