"""Whether compiled code leaves a wgmma's first operand alone, where that comes from registers, until it has been read.

A wgmma runs on after it is issued. Until `wgmma.wait_group` covers it, nothing may touch its registers (PTX ISA,
"wgmma.wait_group"): what is written too early is multiplied, now and then, and no run without a GPU shows it. Compilers
have left such waits out (triton-lang/triton, issue 9433), so the machine code is looked at.
"""

import re
from typing import Any

from tests.support.aot import machine_code

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;", re.M)
_OPERAND = re.compile(r"R\d+, R(\d+), gdesc")  # of a product: the result, then four registers
_CLOSED = ", gsb0"  # ends a group of products
_PENDING = re.compile(r"gsb0, 0x([0-9a-f]+)")  # of a wait: the groups that need not be done yet
_RESULT = re.compile(r"(?:U?P\w+, )?R(\d+)\b")
# Opcodes whose first register is read, or (products) written after all earlier products have read theirs.
_NO_RESULT = re.compile(r"ST|RED|BAR|UTMA|SYNCS\.ARRIVE|[HQIB]GMMA")
_MOST_GROUPS = 8  # the largest N that a wait of these kernels has


def overwritten_operands(kernel: Any) -> list[str]:
    """Instructions of a `triton.compile` result that write a register which a product may not have read yet, as
    "address of the product <- address: instruction". Every way from a product to the wait for it is followed."""
    return overwritten(machine_code(kernel.asm["cubin"]))


def overwritten(sass: str) -> list[str]:
    """The same of the machine code as text."""
    code = [(int(address, 16), guard, op, rest) for address, guard, op, rest in _INSTRUCTION.findall(sass)]
    place = {address: i for i, (address, *_) in enumerate(code)}
    found = []
    for i, (address, _, op, rest) in enumerate(code):
        product = _OPERAND.search(rest) if "GMMA" in op else None
        if product is None:
            continue
        operand = set(range(int(product[1]), int(product[1]) + 4))
        seen: set[tuple[int, int]] = set()
        todo = [(i + 1, int(_CLOSED in rest))]  # groups closed from this product on, its own the first
        while todo:
            state = todo.pop()
            if state in seen or state[0] >= len(code):
                continue
            seen.add(state)
            at, closed = state
            here, guard, op, rest = code[at]
            wait = _PENDING.search(rest) if op.startswith("WARPGROUP.DEPBAR") else None
            if wait is not None and closed > int(wait[1], 16):
                continue
            if operand & _written(op, rest):
                found.append(f"{address:#x} <- {here:#x}: {op} {rest}")
            if "GMMA" in op and _CLOSED in rest:
                closed = min(_MOST_GROUPS, closed + 1)
            if op == "BRA":
                todo.append((place[int(re.findall(r"0x([0-9a-f]+)", rest)[-1], 16)], closed))
            if guard or op not in ("BRA", "EXIT", "RET"):
                todo.append((at + 1, closed))
    return found


def _written(op: str, rest: str) -> set[int]:
    """The registers that an instruction writes."""
    result = _RESULT.match(rest)
    if result is None or _NO_RESULT.match(op):
        return set()
    parts = op.split(".")
    count = 4 if "128" in parts or parts[-1] == "4" else 2 if {"64", "WIDE"} & set(parts) or parts[-1] == "2" else 1
    return set(range(int(result[1]), int(result[1]) + count))
