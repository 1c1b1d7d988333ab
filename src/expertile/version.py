"""Which expertile this is: its version, and the commit that its files are of."""

import os
import re
from functools import cache
from pathlib import Path

__version__ = "0.1.0"

COMMIT_FILE = "commit.txt"  # beside this module in a wheel and in an sdist; setup.py writes it
COMMIT_VARIABLE = "EXPERTILE_COMMIT"
_PACKAGE = Path(__file__).resolve().parent


@cache
def commit() -> str | None:
    """The commit of this process's expertile, 12 hexadecimal digits; "+dirty" follows if src/ differs from that commit.

    Asked in turn are the file that a build left in the package, git where the package lies in its own work tree, and
    the environment variable EXPERTILE_COMMIT, for a tree copied without .git or over another commit's: it outvotes a
    work tree that differs from its commit. None if none of them says.

    Raises ValueError if the variable is asked and holds no commit.
    """
    if (build := _of_build(_PACKAGE)) is not None:
        return build
    tree = _of_work_tree(_PACKAGE.parents[1])
    return (_of_environment() or tree) if tree is None or tree.endswith("+dirty") else tree


def _of_work_tree(root: Path) -> str | None:
    # A package installed somewhere inside another project's work tree must not take that project's commit for its own.
    top = _git(root, "rev-parse", "--show-toplevel")
    head = _git(root, "rev-parse", "--short=12", "HEAD")
    changes = _git(root, "status", "--porcelain", "--", "src")
    if top is None or head is None or changes is None or Path(top).resolve() != root:
        return None
    return head + ("+dirty" if changes else "")


def _of_build(package: Path) -> str | None:
    path = package / COMMIT_FILE
    return path.read_text(encoding="ascii").strip() if path.is_file() else None


def _of_environment() -> str | None:
    value = os.environ.get(COMMIT_VARIABLE)
    if value and not re.fullmatch(r"[0-9a-f]{7,40}(\+dirty)?", value):
        raise ValueError(
            f"{COMMIT_VARIABLE}: expected 7 to 40 hexadecimal digits, +dirty after them or not, got {value!r}"
        )
    return value or None


def _git(root: Path, *words: str) -> str | None:
    """What git prints, or None if there is no git or it refuses."""
    import subprocess  # a third of what `import expertile` takes

    # Variables such as GIT_DIR, which a hook has, name another repository.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", "--no-optional-locks", "-C", str(root), *words],
            capture_output=True,
            text=True,
            check=False,
            env=plain,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
