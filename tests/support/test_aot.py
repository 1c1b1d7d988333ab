"""The machine code that tests look at is what cuobjdump shows of the same kernel."""

import re
from collections import Counter

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from tests.support import aot
from tests.support.fake_driver import compile_only, ptxas_logs


@triton.jit
def _mean_kernel(x_ptr, out_ptr, n):
    total = 0.0
    for i in range(n):
        total += tl.load(x_ptr + i)
    tl.store(out_ptr, tl.div_rn(total, n.to(tl.float32)))


def _instructions(listing: str) -> list[str]:
    return [re.sub(r"[\s,]", "", found) for found in re.findall(r"^\s+(/\*[0-9a-f]{4,}\*/.*?;)", listing, re.M)]


@pytest.mark.compile
@pytest.mark.parametrize("arch", [80, 90])
def test_machine_code(arch):
    with compile_only(arch) as kernels:
        _mean_kernel[(1,)](torch.empty(8), torch.empty(1), 8)
    (kernel,) = kernels
    shown = aot._read(kernel.asm["cubin"], knobs.nvidia.cuobjdump.path, "--dump-sass")
    # A loop and a call: targets before and behind the instruction, of another function.
    assert re.search(r"BRA 0x", shown) and re.search(r"CALL.* 0x", shown)
    assert _instructions(aot.machine_code(kernel.asm["cubin"])) == _instructions(shown)


@pytest.mark.compile
@pytest.mark.parametrize("arch", [80, 90])
def test_opcodes_are_those_of_the_machine_code(arch, monkeypatch):
    """From the disassembler, from the numbers that it has named, and from it again where a number has two names."""
    with compile_only(arch) as kernels:
        _mean_kernel[(1,)](torch.empty(8), torch.empty(1), 8)
    cubin = kernels[0].asm["cubin"]
    shown = Counter(name.split(".")[0] for _, name, _ in aot._INSTRUCTION.findall(aot.machine_code(cubin)))
    read, asked = aot._read, []
    monkeypatch.setattr(aot, "_read", lambda *words: asked.append(words) or read(*words))
    known = aot.known_names()
    monkeypatch.setattr(aot, "known_names", dict)
    monkeypatch.setattr(aot, "_names", {})
    aot.machine_code.cache_clear()
    for _ in range(2):
        assert aot._opcodes(cubin, arch) == shown and len(asked) == 1
    assert all(names == known.get(key, names) for key, names in aot._names.items())
    next(iter(aot._names.values())).add("FHADD")
    aot.machine_code.cache_clear()
    assert aot._opcodes(cubin, arch) == shown and len(asked) == 2


@pytest.mark.compile
def test_warnings_are_those_of_ptxas(monkeypatch, tmp_path):
    """Of the run in which Triton compiled, and of a second one where Triton had the kernel from its cache."""
    monkeypatch.setattr(aot.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(aot, "ptxas_logs", {})
    found = []
    for _ in range(2):
        _mean_kernel.device_caches.clear()
        with compile_only(90) as kernels:
            _mean_kernel[(1,)](torch.empty(8), torch.empty(1), 8)
        found.append(aot.resources(kernels[0], 90))
    first = ptxas_logs[found[0].cubin]
    second = aot._assembled(found[1])
    assert aot.ptxas_warnings(found[0]) == aot.ptxas_warnings(found[1]) == []
    for log in (first, second):
        assert f"Used {found[0].registers} registers" in log
        monkeypatch.setattr(aot, "ptxas_logs", {found[0].cubin: log + "(C7510) Potential Performance Loss: wgmma"})
        assert len(aot.ptxas_warnings(found[0])) == 1
