"""No result on a CPU depends on what uninitialised memory held; nor of Triton's kernels, through the interpreter."""

from dataclasses import replace

import pytest
import torch

from tests.support import interpreter, uninitialised
from tests.support.uninitialised import BY_BACKEND, NAMES, failures

DTYPES = (torch.bfloat16, torch.float32)

if interpreter.active():
    interpreter.repair()
    DTYPES = DTYPES[:1]
else:

    def test_under_the_interpreter():
        interpreter.run_file_interpreted(__file__)


@pytest.mark.parametrize("name", NAMES)
def test_on_a_cpu(name):
    ran, tokens = 0, (3, 50) if interpreter.active() else (1, 3, 50, 600)
    for dtype in DTYPES:
        if name.startswith("weight-only") and dtype is torch.float32:
            continue
        wrong, some = failures(name, "cpu", dtype, tokens)
        assert not wrong, "\n".join(wrong)
        ran += some
    if ran == 0:
        assert name in BY_BACKEND
        pytest.skip("does not run on a CPU")


@pytest.mark.parametrize("where", ["padding that is multiplied", "rows past the end"])
def test_a_leak_is_found(where, monkeypatch):
    _, name = BY_BACKEND["grouped:loop"]

    def leaky(problem, operands, config, out):
        out = backend.run(problem, operands, config, out)
        return out + out.new_empty(1) * 0 if where == "padding that is multiplied" else out + out[-1:] * 0

    backend = next(b for b in uninitialised.GROUPED if b.name == name)
    monkeypatch.setattr("expertile.ops.grouped_mm.api.by_name", lambda name: replace(backend, run=leaky))
    wrong, _ = failures("grouped:loop", "cpu", torch.float32)
    assert any("rows: result 0" in w for w in wrong)
