"""What a compiled Triton or Gluon kernel needs and does: registers, spills, shared memory, opcodes, ptxas warnings.

Reads the cubin with the tools that ship in the triton package; no GPU and no CUDA toolkit needed.
"""

import re
import struct
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas

from expertile.ops.launch.versions import TRITON
from tests.support.fake_driver import ptxas_logs

# Most dynamic shared memory one block may use, bytes (CUDA C++ Programming Guide, table of compute capabilities).
SMEM_LIMIT = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}

# Triton 3.9 brings ptxas 13.4, 3.6 to 3.8 bring 12.8 and 12.9 for sm_90 and before.
_PTXAS_13_4 = TRITON >= (3, 9)


def most_spills(usual: int, ptxas_13_4: int) -> int:
    """How many loads and stores of registers to local memory a kernel may have: ptxas 13.4 keeps some values that last
    from tile to tile, or that an epilogue has, in memory where 12.8 has them in registers."""
    return ptxas_13_4 if _PTXAS_13_4 else usual


_INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*?);", re.M)
_ENCODED = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*).*?;\s+/\* 0x([0-9a-f]{16}) \*/", re.M
)
_TARGET = re.compile(r"0x([0-9a-f]+)")
_LABEL_OR_ADDRESS = re.compile(r"^(?:([.$\w]+):$|\s*/\*([0-9a-f]{4,})\*/)", re.M)
_LABEL_MEANT = re.compile(r"`\(([.$\w]+)\)")


@dataclass(frozen=True)
class Resources:
    """Resources of one compiled kernel."""

    name: str
    arch: int
    registers: int
    stack_bytes: int
    smem_bytes: int
    num_warps: int
    ptx: str
    cubin: bytes = field(repr=False)

    @cached_property
    def opcodes(self) -> Counter[str]:
        """SASS instructions by their first name ("HGMMA", "LDGSTS")."""
        return _opcodes(self.cubin, self.arch)

    @property
    def fits(self) -> bool:
        """Whether a block may have that much shared memory."""
        return self.smem_bytes <= SMEM_LIMIT[self.arch]

    @property
    def spills(self) -> int:
        """Loads and stores of registers to local memory; a kernel without a stack has none."""
        return self.opcodes["LDL"] + self.opcodes["STL"] if self.stack_bytes else 0

    def __str__(self) -> str:
        keep = ("HMMA", "HGMMA", "QGMMA", "UTCHMMA", "UTMALDG", "UTMASTG", "LDGSTS", "FFMA")
        used = {o: self.opcodes[o] for o in keep if self.opcodes[o]}
        return (
            f"{self.name} sm_{self.arch}: {self.registers} registers, {self.spills} spills, "
            f"{self.smem_bytes} of {SMEM_LIMIT[self.arch]} bytes, {self.num_warps} warps, {used}"
        )


def resources(kernel: Any, arch: int) -> Resources:
    """Read a `triton.compile` result (or what a `warmup` returned)."""
    cubin = kernel.asm["cubin"]
    usage = _read(cubin, knobs.nvidia.cuobjdump.path, "--dump-resource-usage")
    found = re.search(r"REG:(\d+).*?STACK:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump printed no resource usage: {usage[-500:]}")
    return Resources(
        kernel.metadata.name,
        arch,
        int(found[1]),
        int(found[2]),
        kernel.metadata.shared,
        kernel.metadata.num_warps,
        kernel.asm["ptx"],
        cubin,
    )


def ptxas_warnings(compiled: Resources) -> list[str]:
    """ptxas's performance warnings about a kernel: C7510 (wgmma serialised), C7508 (setmaxnreg ignored) and their like.

    Triton shows them where it compiles; the PTX of a kernel from its cache goes through the bundled ptxas again."""
    log = ptxas_logs.get(compiled.cubin)
    if log is None:
        log = _assembled(compiled)
    return [line for line in log.splitlines() if re.search(r"\bC75\d\d\b", line)]


def _assembled(compiled: Resources) -> str:
    """What ptxas says of a kernel's PTX."""
    tool = get_ptxas(compiled.arch).path
    feature = "a" if compiled.arch >= 90 else ""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(compiled.ptx)
        return _output(tool, "-v", f"--gpu-name=sm_{compiled.arch}{feature}", str(source), "-o", f"{folder}/kernel.o")


def spills_in_loops(kernel: Any, opcode: str) -> int:
    """Loads and stores of registers to local memory in the innermost loop of a `triton.compile` result that has
    instructions of that name ("HMMA"). The others cost little: they keep what a tile needs before and after it."""
    sass = machine_code(kernel.asm["cubin"])
    code = [(int(at, 16), name, rest) for at, name, rest in _INSTRUCTION.findall(sass)]
    jumps = [(int(target, 16), at) for at, name, rest in code if name == "BRA" for target in _TARGET.findall(rest)]
    loops = []
    for start, end in jumps:
        names = [name.split(".")[0] for at, name, _ in code if start <= at <= end]
        if opcode in names:
            loops.append((len(names), names.count("LDL") + names.count("STL")))
    if not loops:
        raise ValueError(f"expected a loop with {opcode}, found none")
    return min(loops)[1]


@lru_cache(maxsize=4)
def machine_code(cubin: bytes) -> str:
    """A cubin's instructions, one a line, with their addresses and encodings; targets of jumps are addresses as well.

    cuobjdump writes the same, and takes twice the time: it has nvdisasm follow all data first."""
    sass = _read(cubin, knobs.nvidia.nvdisasm.path, "--print-code", "--no-dataflow", "--print-instruction-encoding")
    at: dict[str, str] = {}
    names: list[str] = []
    for label, address in _LABEL_OR_ADDRESS.findall(sass):
        if label:
            names.append(label)
        else:
            at |= dict.fromkeys(names, address)
            names = []
    return _LABEL_MEANT.sub(lambda found: f"{int(at[found[1]], 16):#x}", sass)


@lru_cache
def known_names() -> dict[tuple[int, int], set[str]]:
    """Names of an architecture's instructions by their number, as the disassembler has told them of all our kernels.
    Lines of opcodes.txt: the architectures, then each name with its numbers."""
    known: dict[tuple[int, int], set[str]] = {}
    for line in Path(__file__).with_name("opcodes.txt").read_text().splitlines():
        arches, _, words = line.partition(":")
        for name, _, numbers in (word.partition("=") for word in words.split()):
            for arch, number in product(arches.split(), numbers.split(",")):
                known.setdefault((int(arch), int(number, 16)), set()).add(name)
    return known


_names: dict[tuple[int, int], set[str]] = {}  # what this process has learnt beside


def _opcodes(cubin: bytes, arch: int) -> Counter[str]:
    """Instructions by their first name, which the number in an instruction's lowest 12 bits has.

    The disassembler takes a quarter of a second to start, as long as Triton takes to compile a small kernel. It runs
    for kernels with a number that it has not named yet, or to which it has given two names."""
    numbers = [low & 0xFFF for low, _ in struct.iter_unpack("<QQ", _code(cubin))]
    keys = {number: (arch, number) for number in set(numbers)}
    known = {number: known_names().get(key, set()) | _names.get(key, set()) for number, key in keys.items()}
    if all(len(names) == 1 for names in known.values()):
        return Counter(name for number in numbers for name in known[number])
    found = _ENCODED.findall(machine_code(cubin))
    for name, low in found:
        _names.setdefault((arch, int(low, 16) & 0xFFF), set()).add(name)
    return Counter(name for name, _ in found)


def _code(cubin: bytes) -> bytes:
    """The instructions in an ELF file: its executable sections."""
    (start,), (size, count) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    return b"".join(cubin[at : at + length] for _, _, flags, _, at, length in sections if flags & 4)


def _read(cubin: bytes, *command: str) -> str:
    """What a tool prints of a cubin."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return _output(*command, str(path))


def _output(*command: str) -> str:
    return subprocess.run(command, text=True, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT).stdout
