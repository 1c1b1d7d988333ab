"""Write the figures of docs/transformers.md from the shipped run of one layer of each model.

    python tools/transformers_figures.py [FILE.jsonl] [--gpu nvidia-h200] [--doc docs/transformers.md] [--check]

Without a file the newest of results/<gpu>/transformers/ is used. With `--check` nothing is written, and the exit
status is 1 if the page is not what the file says.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from expertile.device import Device
from expertile.lab.report.transformers import shipped_transformers, update_page


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", nargs="?", type=Path, help="JSONL file of tools/measure_transformers.py")
    parser.add_argument("--gpu", default="nvidia-h200", help="the GPU that was measured on")
    parser.add_argument("--doc", type=Path, default=Path("docs/transformers.md"))
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    device = Device.by_name(options.gpu)
    current = update_page(options.doc, options.file or shipped_transformers(device.slug), device, options.check)
    if options.check and not current:
        print(f"{options.doc}: not what the records say; run python tools/transformers_figures.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
