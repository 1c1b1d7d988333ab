"""The audit of files, as `expertile audit` and `python -m expertile.audit` do it."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from expertile.audit.engine import Audit, audit_text
from expertile.audit.finding import ACCUSATIONS, IMPOSSIBLE, INCONSISTENT
from expertile.audit.render import FORMATS, render

FAIL_ON = {INCONSISTENT: ACCUSATIONS, IMPOSSIBLE: (IMPOSSIBLE,), "never": ()}


def run(files: Sequence[str], form: str, out: Path | None, fail_on: str, **setup: str) -> bool:
    """Audit `files` ("-" is standard input), print or write the verdicts, and say whether none fails.

    `setup`: gpu, dtype, shape as `audit_text` takes them. Raises ValueError for a choice that is not known, OSError for
    a file that cannot be read.
    """
    if fail_on not in FAIL_ON:
        raise ValueError(f"fail-on: expected one of {', '.join(FAIL_ON)}, got {fail_on!r}")
    audits = [_audit(name, **setup) for name in files]
    text = render(audits, form)
    if out is None:
        print(text)
    else:
        out.write_text(text + "\n", encoding="utf-8")
    return not any(f.verdict in FAIL_ON[fail_on] for audit in audits for f in audit.findings)


def _audit(name: str, **setup: str) -> Audit:
    standard = name == "-"
    text = sys.stdin.read() if standard else Path(name).read_text(encoding="utf-8", errors="replace")
    return audit_text(text, "" if standard else name, **setup)


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m expertile.audit`: 0 where nothing fails, 1 where a claim does, 2 for a mistake of the caller's."""
    parser = argparse.ArgumentParser("python -m expertile.audit", description=__doc__)
    parser.add_argument("files", nargs="+", help="Markdown, HTML, CSV, JSON, notebooks, logs; - is stdin")
    for flag, help_of in (("shape", "MxNxK"), ("gpu", "the GPU"), ("dtype", "the format")):
        parser.add_argument(f"--{flag}", default="", help=f"{help_of} that the text leaves out")
    parser.add_argument("--format", dest="form", default="text", choices=FORMATS)
    parser.add_argument("--out", type=Path, help="write to this file instead of the terminal")
    parser.add_argument("--fail-on", default=INCONSISTENT, choices=list(FAIL_ON), help="what exits with 1")
    try:
        return 0 if run(**vars(parser.parse_args(arguments))) else 1
    except (ValueError, OSError) as error:
        print(f"expertile: {error}", file=sys.stderr)
        return 2
