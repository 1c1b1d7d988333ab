"""Generated text inside hand-written pages, between `<!-- expertile:KEY -->` and `<!-- /expertile:KEY -->`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def filled(text: str, blocks: Mapping[str, str], path: str | Path) -> str:
    """`text` with each block put between the markers of its key, on lines of its own; all else stays as it is.

    Raises ValueError, naming `path`, unless the text has both markers of every key exactly once, in order.
    """
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


def fill_file(path: str | Path, blocks: Mapping[str, str], check: bool = False) -> bool:
    """`filled` for a file; returns whether it was up to date already. With `check` nothing is written."""
    path = Path(path)
    text = path.read_bytes().decode("utf-8")
    updated = filled(text, blocks, path)
    if updated != text and not check:
        path.write_bytes(updated.encode("utf-8"))
    return updated == text
