"""The name that somebody who mistyped one probably meant."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'squares'?" for a `name` that is close to one of `known`, whatever its case; else ""."""
    by_lower = {other.lower(): other for other in known}
    found = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.7)
    return f"; did you mean {by_lower[found[0]]!r}?" if found else ""
