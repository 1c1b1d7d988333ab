"""A moved line and a new name are no difference, another instruction is."""

import importlib
import json
import re

import pytest
import torch
import triton

from tests.support.fake_driver import compile_only
from tools import ptx_net

PTX = """
.target sm_90a
.func  (.param .b32 func_retval0) home_$_kernels_$_add__i32_i32(.param .b32 home_$_kernels_$_add__i32_i32_param_0)
.visible .entry total(
	.param .u64 total_param_0
)
{
	.reg .b32 	%r<9>;
	.loc	1 302 0                         // kernels.py:302:0
$L__func_begin0:
	ld.param.b32 %r7, [total_param_0];
$L__tmp3:
	add.s32 	%r8, %r7, 1;  // %.lr.ph
$L__BB1_2:
	mul.lo.s32 	%r3, %r8, %r7;
	@%p4 bra 	$L__BB1_2;
	ret;
}
	.file	1 "/home/kernels.py"
	.section	.debug_str
	{
$L__info_string0:
.b8 115
	}
	.section	.debug_macinfo	{	}
"""

KERNEL = """
import triton
import triton.language as tl


@triton.jit
def doubled(x_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x_ptr + at, tl.load(x_ptr + at) * 2)
"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("302", "417"),
        ("total", "sum_of_all"),
        ("home_$_kernels_$_add", "away_$_plus"),
        ("%r7", "%r12"),
        ("BB1_2", "BB0_5"),
        ("_tmp3:", "_tmp4:"),
        (".b8 115", ".b8 116"),
        ("%r<9>", "%r<10>"),
        ("lr.ph", "loopexit"),
    ],
)
def test_positions_and_names_do_not_count(old, new):
    assert old in PTX and ptx_net.canonical(PTX.replace(old, new)) == ptx_net.canonical(PTX)


@pytest.mark.parametrize(
    ("old", "new"), [("add.s32", "sub.s32"), ("%r7, 1;", "%r7, 2;"), ("%r8, %r7", "%r7, %r8"), ("sm_90a", "sm_100a")]
)
def test_instructions_count(old, new):
    assert old in PTX and ptx_net.canonical(PTX.replace(old, new)) != ptx_net.canonical(PTX)


@pytest.mark.parametrize(
    ("new", "same"),
    [
        ("\tmul.lo.s32 	%r3, %r8, %r7;\n\tadd.s32 	%r8, %r7, 1;", True),
        ("\tadd.s32 	%r8, %r7, 1;\n\tmul.lo.s32 	%r3, %r7, %r7;", True),
        ("\tadd.s32 	%r8, %r7, 2;\n\tmul.lo.s32 	%r3, %r8, %r7;", False),
        ("\tadd.s32 	%r8, %r7, 1;\n\tmul.hi.s32 	%r3, %r8, %r7;", False),
    ],
)
def test_another_order(new, same):
    old = "\tadd.s32 	%r8, %r7, 1;\n\tmul.lo.s32 	%r3, %r8, %r7;"
    texts = [ptx_net.canonical(text) for text in (old, new)]
    assert texts[0] != texts[1]
    assert (ptx_net._unordered(texts[0]) == ptx_net._unordered(texts[1])) == same


def _record(**kernels):
    entries = [
        {"kernel": k, "arch": 90, "arguments": f"BLOCK={i}", "ptx": p, "lines": p.lower(), "at": f"/{p}"}
        for k, hashes in kernels.items()
        for i, p in enumerate(hashes)
    ]
    return {"triton": "3.9.0", "status": 0, "kernels": entries}


@pytest.mark.parametrize(
    ("new", "status", "words"),
    [
        (_record(gemm=["b", "a", "a"], row=["c"]), 0, "2 kernels of 2"),
        (_record(product=["a", "a", "b"], row=["c"]), 0, "renamed  gemm -> product"),
        (_record(gemm=["a", "b", "B"], row=["c"]), 1, "changed  gemm: 1 of 3 -> 1\n"),
        (_record(gemm=["a", "A", "b"], row=["c"]), 1, "changed  gemm: 1 of 3 -> 1 (order alone)"),
        (_record(product=["a", "d"], row=["c"]), 1, "changed  gemm -> product: 2 of 3 -> 1\n"),
        (_record(gemm=["a", "a", "b"]), 1, "missing  row: 1 compilations"),
        (_record(gemm=["a", "a", "b"], row=["c"], x=["e"]), 1, "new      x: 1 compilations"),
        ({"triton": "3.8.0", "status": 0, "kernels": []}, 2, "not comparable: Triton 3.9.0 and 3.8.0"),
    ],
)
def test_compare(new, status, words, tmp_path, capsys):
    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    for path, record in zip(paths, (_record(gemm=["a", "a", "b"], row=["c"]), new), strict=True):
        path.write_text(json.dumps(record))
    assert ptx_net.main(["compare", *map(str, paths)]) == status
    assert words in capsys.readouterr().out


@pytest.mark.compile
@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")
def test_hears_what_triton_compiles(tmp_path, monkeypatch):
    """A kernel under another name, with another argument and on other lines; then one that does something else."""
    monkeypatch.setattr(triton.knobs.compilation, "listener", None)
    monkeypatch.syspath_prepend(tmp_path)
    moved = "# a line\n" * 5 + KERNEL.replace("doubled", "twice").replace("SIZE", "COUNT").replace("at", "place")
    found = []
    for number, source in enumerate((KERNEL, KERNEL, moved, KERNEL.replace("* 2", "* 3"))):
        (tmp_path / f"ptx_net_{number}.py").write_text(source)
        module = importlib.import_module(f"ptx_net_{number}")
        recorder = ptx_net.Recorder(tmp_path)
        with compile_only(90):
            kernel = module.twice if module.__dict__.get("twice") else module.doubled
            kernel[(1,)](torch.empty(128), 128, enable_fp_fusion=True)
        (entry,) = recorder.found.values()
        assert re.fullmatch(r"num_warps=4 num_stages=3.* x_ptr:\*fp32/16 (SIZE|COUNT)=128", entry["arguments"])
        found.append(entry)
    assert [e["kernel"] for e in found] == ["doubled", "doubled", "twice", "doubled"]
    assert found[0]["ptx"] == found[1]["ptx"] == found[2]["ptx"] != found[3]["ptx"]
    assert found[3]["arch"] == 90
