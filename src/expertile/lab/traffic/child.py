"""The small process that Nsight Compute watches: one way of one operator, once warm, once between profiler marks.

python -m expertile.lab.traffic.child '{"op": "softmax", "dims": {"rows": 8192, "cols": 8192}, "dtype": "fp32"}' torch
"""

from __future__ import annotations

import json
import sys

import torch

from expertile.lab.traffic.model import Subject
from expertile.lab.traffic.runs import prepare


def encode(subject: Subject) -> str:
    """A subject as the child's first argument."""
    return json.dumps({"op": subject.op, "dims": dict(subject.dims), "dtype": subject.dtype})


def decode(text: str) -> Subject:
    """The subject of the child's first argument."""
    data = json.loads(text)
    dims = tuple((key, tuple(v) if isinstance(v, list) else v) for key, v in data["dims"].items())
    return Subject(data["op"], dims, data["dtype"])


def main(arguments: list[str]) -> None:
    """Run `arguments` (subject, way) on the current GPU."""
    call = prepare(decode(arguments[0]), arguments[1], "cuda")
    call()  # compiles, tunes and fills the allocator
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    call()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


if __name__ == "__main__":
    main(sys.argv[1:])
