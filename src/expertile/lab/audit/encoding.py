"""Undo a wrong decoding: UTF-8 text that was once read as Mac Roman, Windows-1252 or Latin-1 ("√ó" for "×")."""

from __future__ import annotations

import re
import unicodedata

_RUN = re.compile(r"[^\x00-\x7f]+")
_NEVER_MEANT = ("Cc", "Cn", "Co", "Cs", "Zl", "Zp")  # controls, unassigned, private use, line separators
_WRONG = ("mac_roman", "cp1252", "latin-1")
_MOST = 0.8  # of all runs must decode: in right text a lone "×" or "µ" never does


def repair(text: str) -> str:
    """`text` with its mis-decoded runs of non-ASCII characters put right; line breaks stay.

    A wrong charset is assumed only if nearly every such run encodes in it to bytes that are valid UTF-8.
    """
    runs = _RUN.findall(text)
    fits = {charset: sum(_decoded(run, charset) is not None for run in runs) for charset in _WRONG}
    charset = max(fits, key=lambda c: fits[c])
    if not runs or fits[charset] < _MOST * len(runs):
        return text
    return _RUN.sub(lambda m: _decoded(m[0], charset) or m[0], text)


def _decoded(run: str, charset: str) -> str | None:
    try:
        fixed = run.encode(charset).decode("utf-8")
    except (UnicodeEncodeError, UnicodeDecodeError):
        return None
    return fixed if all(unicodedata.category(c) not in _NEVER_MEANT for c in fixed) else None
