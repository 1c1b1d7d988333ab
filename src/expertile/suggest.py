"""The name that somebody who mistyped one probably meant."""

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

_LISTED = 12  # names that an error lists
_AS_NEAR = 0.12  # difference of two ratios from which on the lower one is no likely name


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean 'squares'?" for a `name` that is close to one or two of `known`, whatever its case; else ""."""
    if not isinstance(name, str):
        return ""
    by_lower = {other.lower(): other for other in known}
    found = get_close_matches(name.lower(), by_lower, n=2, cutoff=0.7)
    ratios = [SequenceMatcher(None, other, name.lower()).ratio() for other in found]
    likely = [repr(by_lower[other]) for other, ratio in zip(found, ratios, strict=True) if ratio > ratios[0] - _AS_NEAR]
    return f"; did you mean {' or '.join(likely)}?" if likely else ""


def one_of(name: str, known: Iterable[str]) -> str:
    """ "one of a, b, c, got 'x'" for an error, and what was probably meant.

    Of many names the first 12 are listed; where one is near, their number alone.
    """
    names = list(dict.fromkeys(known))
    hint = did_you_mean(name, names)
    listed = ", ".join(names[:_LISTED])
    if len(names) > _LISTED:
        listed = f"{len(names)} names" if hint else f"{listed} and {len(names) - _LISTED} more"
    return f"one of {listed}, got {name!r}{hint}"
