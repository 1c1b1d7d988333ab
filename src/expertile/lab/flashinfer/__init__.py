"""flashinfer-bench's format, both ways: its definitions raced here, and records of ours written for it.

    definition.py   definitions and workloads of a folder, and their inputs
    served.py       the calls of expertile that compute them; a solution carries this file
    kinds.py        which definitions are served, by which call; their work and tolerance
    race.py         a definition as an operator of the lab
    traces.py       records -> definitions, workloads, solutions and traces

The format: https://bench.flashinfer.ai/docs/flashinfer-trace. flashinfer-bench itself is not needed.
"""

from expertile.lab.flashinfer.definition import Definition, Task, load
from expertile.lab.flashinfer.race import operator, workload
from expertile.lab.flashinfer.traces import write

__all__ = ["Definition", "Task", "load", "operator", "workload", "write"]
