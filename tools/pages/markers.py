"""Generated text inside hand-written pages, between `<!-- expertile:KEY -->` and `<!-- /expertile:KEY -->`."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType


def filled(text: str, blocks: Mapping[str, str], path: str | Path) -> str:
    """`text` with each block put between the markers of its key, on lines of its own; all else stays as it is.
    ValueError, naming `path`, unless the text has both markers of every key exactly once, in order."""
    newline = "\r\n" if "\r\n" in text else "\n"
    for key, body in blocks.items():
        first, last = f"<!-- expertile:{key} -->", f"<!-- /expertile:{key} -->"
        if text.count(first) != 1 or text.count(last) != 1 or text.index(first) > text.index(last):
            raise ValueError(
                f"{path}: expected {first} and then {last}, each exactly once, "
                f"got {text.count(first)} and {text.count(last)}"
            )
        before, rest = text.split(first)
        after = rest.split(last)[1]
        lines = f"\n{body}\n".replace("\n", newline)
        text = f"{before}{first}{lines}{last}{after}"
    return text


def fill_file(
    path: str | Path,
    blocks: Mapping[str, str],
    check: bool = False,
    kind: str = "",
    files: Mapping[Path, str] = MappingProxyType({}),
) -> bool:
    """`filled` for a file, with keys that begin with `kind`, and whole `files` (figures) beside it; returns whether all
    were up to date already. With `check` nothing is written."""
    path = Path(path)
    named = {f"{kind} {name}".strip(): text for name, text in blocks.items()}
    wanted = {path: filled(path.read_bytes().decode("utf-8"), named, path), **files}
    stale = {p: text for p, text in wanted.items() if not p.is_file() or p.read_bytes().decode("utf-8") != text}
    for file, text in ({} if check else stale).items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode("utf-8"))
    return not stale
