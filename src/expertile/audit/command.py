"""The audit of files, as `expertile audit` and `python -m expertile.audit` do it."""

import argparse
import gc
import sys
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from expertile.audit.engine import Audit, audit_text
from expertile.audit.finding import ACCUSATIONS, IMPOSSIBLE, INCONSISTENT
from expertile.audit.render import FORMATS, render

FAIL_ON = {INCONSISTENT: ACCUSATIONS, IMPOSSIBLE: (IMPOSSIBLE,), "never": ()}
WHAT = "Check somebody's benchmark report against arithmetic and hardware limits; exit 1 if a claim fails."
HELP = {
    "files": "Markdown, HTML, CSV, JSON, notebooks, logs; - is stdin.",
    "--shape": "The shape that the text leaves out: MxNxK.",
    "--gpu": "The GPU that the text leaves out.",
    "--dtype": "The format that the text leaves out: bf16, fp16, fp32, fp8 …",
    "--format": f"One of {', '.join(FORMATS)}.",
    "--out": "Write to this file instead of the terminal.",
    "--fail-on": "inconsistent (or worse), impossible, never: exit 1.",
    "--json": "The same as --format json.",
}


def run(files: Sequence[str], form: str, out: Path | None, fail_on: str, **setup: str) -> bool:
    """Audit `files` ("-" is standard input), print or write the verdicts, and say whether none fails.

    `setup`: gpu, dtype, shape as `audit_text` takes them. Raises ValueError for a choice that is not known, and for a
    file that cannot be read or written.
    """
    if fail_on not in FAIL_ON:
        raise ValueError(f"fail-on: expected one of {', '.join(FAIL_ON)}, got {fail_on!r}")
    try:
        audits = [_audit(name, **setup) for name in files]
        text = render(audits, form)
        if out is None:
            print(text)
        else:
            out.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{error.filename or 'standard output'}: {error.strerror}") from None
    return not any(f.verdict in FAIL_ON[fail_on] for audit in audits for f in audit.findings)


def _audit(name: str, **setup: str) -> Audit:
    standard = name == "-"
    data = sys.stdin.buffer.read() if standard else Path(name).read_bytes()
    text = data.decode("utf-16" if data.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) else "utf-8", errors="replace")
    if "\0" in text or text.count("\ufffd") > 0.2 * len(text):
        raise ValueError(f"{'standard input' if standard else name}: expected text, got bytes that are none")
    return audit_text(text, "" if standard else name, **setup)


def main(arguments: Sequence[str] | None = None, program: str = "python -m expertile.audit") -> int:
    """Without the command line's libraries: 0 where nothing fails, 1 where a claim does, 2 for the caller's mistake."""
    gc.set_threshold(100_000)  # a report makes little garbage; looking for it takes a tenth of the time
    parser = argparse.ArgumentParser(program, description=WHAT)
    parser.add_argument("files", nargs="+", help=HELP["files"])
    special: dict[str, dict[str, Any]] = {
        "--format": {"dest": "form", "default": "text"},
        "--out": {"type": Path, "default": None},
        "--fail-on": {"default": INCONSISTENT},
        "--json": {"dest": "form", "action": "store_const", "const": "json"},
    }
    for flag in list(HELP)[1:]:
        parser.add_argument(flag, help=HELP[flag], **{"default": "", **special.get(flag, {})})
    try:
        return 0 if run(**vars(parser.parse_intermixed_args(arguments))) else 1
    except ValueError as error:
        print(f"expertile: {error}", file=sys.stderr)
        return 2
