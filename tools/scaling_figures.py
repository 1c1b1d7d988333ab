"""Draw how cost grows: docs/figures/*.svg, and the texts between the markers of docs/scaling.md, from records.

    python tools/scaling_figures.py [RECORDS.jsonl …] [--gpu nvidia-h200] [--doc docs/scaling.md] [--check]

Without files the newest shipped records of the presets `scaling` and `skew` on `--gpu` are used. With `--check` nothing
is written, and the exit status is 1 if the document is not what the records say.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from expertile.lab.record import read, shipped_records
from expertile.lab.report.scaling import update_docs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path, help="record files (JSONL)")
    parser.add_argument("--gpu", default="nvidia-h200", help="folder of the shipped records")
    parser.add_argument("--doc", type=Path, default=Path("docs/scaling.md"))
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    records = [record for file in options.files for record in read(file)]
    if not options.files:
        records = [record for preset in ("scaling", "skew") for record in shipped_records(preset, options.gpu)]
    if not records:
        print(f"no records of the presets scaling and skew for {options.gpu}", file=sys.stderr)
        return 2
    current = update_docs(options.doc, records, check=options.check)
    if options.check and not current:
        print(f"{options.doc}: not what the records say; run python tools/scaling_figures.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
