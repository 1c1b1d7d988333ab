"""Write the figures of docs/moe.md from the shipped run of the MoE layer, shipped records and arithmetic.

    python tools/moe_figures.py [FILE.jsonl] [--gpu nvidia-h200] [--doc docs/moe.md] [--check]

Without a file the newest of results/<gpu>/moe/ is used. Records are those of the presets moe-decode and moe-sonic in
results/<gpu>/. With `--check` nothing is written, and the exit status is 1 if
the page is not what the file says.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from expertile.device import Device
from expertile.lab.report.moe import shipped_moe, update_page
from expertile.lab.report.moe_presets import shipped_presets


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", nargs="?", type=Path, help="JSONL file of one run")
    parser.add_argument("--gpu", default="nvidia-h200", help="the GPU that was measured on")
    parser.add_argument("--doc", type=Path, default=Path("docs/moe.md"))
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(argv)
    device = Device.by_name(options.gpu)
    path, records = options.file or shipped_moe(device.slug), shipped_presets(device.slug)
    current = update_page(options.doc, path, records, device, options.check)
    if options.check and not current:
        print(f"{options.doc}: not what the records say; run python tools/moe_figures.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
