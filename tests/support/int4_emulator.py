"""`gluon_emulator` with what kernels for 4-bit weights need beyond matrix products: the PTX that unpacks nibbles,
carried out bit by bit on tensors."""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from tests.support import gluon_emulator
from tests.support.gluon_machine import EmulationError

_WORD = 0xFFFFFFFF
_FLOATS = {"bf16x2": torch.bfloat16, "f16x2": torch.float16}


def _bits(x: torch.Tensor) -> torch.Tensor:
    """Bits of integers or floats of 16 or 32 bits, as non-negative int64."""
    signed = x.view({2: torch.int16, 4: torch.int32}[x.element_size()])
    return signed.long() & ((1 << 8 * x.element_size()) - 1)


def _number(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """int64 bits as numbers of `dtype`: a conversion to fewer bits keeps the low ones."""
    return bits.to({2: torch.int16, 4: torch.int32}[dtype.itemsize]).view(dtype)


def _looked_up(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, table: int) -> torch.Tensor:
    """lop3: bit (4a + 2b + c) of `table`, for each bit."""
    out = torch.zeros_like(a | b | c)
    for case in range(8):
        if table >> case & 1:
            parts = [x if case >> place & 1 else ~x for x, place in ((a, 2), (b, 1), (c, 0))]
            out = out | parts[0] & parts[1] & parts[2]
    return out & _WORD


def _paired(f: Callable[..., torch.Tensor], kind: str) -> Callable[..., torch.Tensor]:
    """An operation on pairs of 16-bit floats, rounded once from float64, which holds sums and products exactly, and
    those of fma if their exponents are near."""

    def apply(*words: torch.Tensor) -> torch.Tensor:
        pairs = (x.to(torch.int32).unsqueeze(-1).view(_FLOATS[kind]).double() for x in words)
        return _bits(f(*pairs).to(_FLOATS[kind]).view(torch.int32).squeeze(-1))

    return apply


def _bytes(a: torch.Tensor, b: torch.Tensor, selectors: torch.Tensor) -> torch.Tensor:
    """prmt: each byte of the result is one of the eight of a and b, or the sign of that byte eight times."""
    eight = a | b << 32
    out = torch.zeros_like(eight | selectors)
    for i in range(4):
        selector = selectors >> 4 * i & 15
        byte = eight >> 8 * (selector & 7) & 255
        out = out | torch.where(selector > 7, 255 * (byte >> 7), byte) << 8 * i
    return out


@lru_cache
def _operation(name: str) -> Callable[..., torch.Tensor]:
    base, *rest = name.split(".")
    if base in ("sub", "mul") and rest[0] == "rn":
        return _paired(torch.sub if base == "sub" else torch.mul, rest[1])
    if base == "add" and rest[0] == "rn":
        return _paired(torch.add, rest[1])
    if base == "fma" and rest[0] == "rn":
        return _paired(lambda a, b, c: a * b + c, rest[1])
    known: dict[str, Callable[..., torch.Tensor]] = {
        "mov.b32": lambda a: a,
        "shr.b32": lambda a, b: a >> b,
        "shr.u32": lambda a, b: a >> b,
        "shl.b32": lambda a, b: a << b & _WORD,
        "shf.r.wrap.b32": lambda low, high, b: (low | high << 32) >> b & _WORD,
        "and.b32": lambda a, b: a & b,
        "setp.ne.u32": lambda a, b: a != b,
        "or.b32": lambda a, b: a | b,
        "add.u32": lambda a, b: a + b & _WORD,
        "prmt.b32": _bytes,
        "mad.lo.u32": lambda a, b, c: a * b + c & _WORD,
        "max.u32": torch.maximum,
        "min.u32": torch.minimum,
        "lop3.b32": lambda a, b, c, table: _looked_up(a, b, c, int(table)),
    }
    if name not in known:
        raise EmulationError(f"PTX that is not emulated: {name}")
    return known[name]


@lru_cache
def _program(asm: str) -> list[tuple[str, list[str]]]:
    """The instructions of an inline PTX program with their operands, targets first."""
    body = asm.strip()
    if body[0] == "{" and body[1].isspace():
        body = body[1:-1]
    lines = [line.split(None, 1) for line in map(str.strip, body.split(";")) if line and not line.startswith(".reg")]
    return [(name, [x.strip() for x in re.findall(r"\{[^}]*\}|[^,\s{][^,]*", rest)]) for name, rest in lines]


@lru_cache
def _constant(number: str) -> torch.Tensor:
    return torch.tensor(int(number, 0))


def ptx(asm: str, results: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Bits of $0 … of an inline PTX program of moves, integer and paired float operations, on int64 bits of inputs."""
    registers: dict[str, torch.Tensor] = {f"${results + i}": x for i, x in enumerate(inputs)}

    def value(name: str) -> torch.Tensor:
        if name.startswith("{"):
            low, high = (value(x.strip()) for x in name.strip("{}").split(","))
            return low & 0xFFFF | (high & 0xFFFF) << 16
        return registers[name] if name in registers else _constant(name)

    for name, (target, *sources) in _program(asm):
        if name == "@p":  # a store that no machine can carry out
            if bool(registers["p"].any()):
                raise EmulationError("a trap")
            continue
        result = _operation(name)(*map(value, sources))
        if target.startswith("{"):
            low, high = (x.strip() for x in target.strip("{}").split(","))
            registers[low], registers[high] = result & 0xFFFF, result >> 16
        else:
            registers[target] = result
    return [registers[f"${i}"] for i in range(results)]


class Language(gluon_emulator.Language):
    float8e4nv = torch.float8_e4m3fn

    def inline_asm_elementwise(
        self, asm: str, constraints: str, args: Any, *, dtype: Any = None, pack: int = 1, **_: Any
    ) -> Any:
        if not (args and asm):
            return super().inline_asm_elementwise(asm, constraints, args)  # barriers, prefetches, and empty PTX
        dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
        bits = [x.clone() for x in torch.broadcast_tensors(*map(_bits, args))]
        if pack == 4:
            return (
                self._of_bytes(asm, bits, dtypes) if isinstance(dtype, tuple) else self._of_bytes(asm, bits, dtypes)[0]
            )
        outs = ptx(asm, len(dtypes), bits)
        numbers = tuple(_number(o.expand(bits[0].shape), d) for o, d in zip(outs, dtypes, strict=True))
        return numbers if isinstance(dtype, tuple) else numbers[0]

    def _of_bytes(self, asm: str, bits: list[torch.Tensor], dtypes: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        """Results of 8 bits, four neighbours from one register; of the four arguments of 32 bits each, all alike."""
        if any(bool((x != x[..., :1]).any()) for x in bits):
            raise EmulationError("the four words of one register differ")
        outs = ptx(asm, len(dtypes), [x for x in bits for _ in range(4)])
        places = 8 * torch.arange(4)
        return tuple((o >> places & 255).to(torch.uint8).view(d) for o, d in zip(outs, dtypes, strict=True))


def run(kernel: Any, grid: int, args: tuple[Any, ...], options: dict[str, Any], seed: int = 0) -> None:
    """`gluon_emulator.run` with the language above."""
    gluon_emulator.run(kernel, grid, args, options, seed, Language)
