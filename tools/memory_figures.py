"""Draw peak memory against length: docs/figures/memory-*.svg, and the text between the markers of a page, from records.

    python tools/memory_figures.py --doc docs/attention.md [RECORDS-memory.jsonl …] [--preset attention]
                                   [--gpu nvidia-h200] [--check]

Without files the newest shipped memory records of `--preset` on `--gpu` are used. With `--check` nothing is written,
and the exit status is 1 if the page is not what the records say.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from expertile.lab.memory import read_memory, shipped_memory
from expertile.lab.report.memory import update_docs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path, help="files of memory records (JSONL)")
    parser.add_argument("--doc", type=Path, required=True, help="page with the markers of the text")
    parser.add_argument("--preset", default="attention")
    parser.add_argument("--gpu", default="nvidia-h200", help="folder of the shipped records")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    records = [record for file in options.files for record in read_memory(file)]
    if not options.files:
        records = list(shipped_memory(options.preset, options.gpu))
    if not records:
        print(f"no memory records of the preset {options.preset} for {options.gpu}", file=sys.stderr)
        return 2
    current = update_docs(options.doc, records, check=options.check)
    if options.check and not current:
        print(f"{options.doc}: not what the records say; run python tools/memory_figures.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
