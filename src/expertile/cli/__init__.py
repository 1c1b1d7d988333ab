"""The command line: each command reads its arguments, calls one function of the lab, and prints the answer."""

import io
import sys

# What `pip install expertile` leaves out and the commands import.
_OF_LAB = ("jinja2", "markdown_it", "pynvml", "rich", "safetensors", "typer")


def main() -> None:
    """Entry point: a user's mistake, or a full disk, is one line on stderr and exit code 2, never a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # "?" for what a terminal without UTF-8 has no sign for
    try:
        if sys.argv[1:2] == ["audit"]:  # typer alone takes as long as the audit of a report
            from expertile.audit.command import main as audit

            raise SystemExit(audit(sys.argv[2:], "expertile audit"))
        from expertile.cli.app import app

        app()
    except ModuleNotFoundError as e:
        missing = (e.name or "").split(".")[0]
        if missing not in _OF_LAB:
            raise
        print(f"expertile: the command needs {missing}, which pip install 'expertile[lab]' brings", file=sys.stderr)
        raise SystemExit(2) from None
    except (ValueError, OSError) as e:
        print(f"expertile: {e}", file=sys.stderr)
        raise SystemExit(2) from None
