"""Tokens per second: against tokens over time, and against reading all weights once per generated token."""

from __future__ import annotations

import re
from math import prod

from expertile.lab.audit.claims import Claim
from expertile.lab.audit.context import Context
from expertile.lab.audit.finding import IMPOSSIBLE, INCONSISTENT, NOT_CHECKABLE, POSSIBLE, Finding
from expertile.lab.audit.quantities import show

_GENERATION = re.compile(r"\btg\d+\b|\btext generation\b|\bdecode\b", re.I)
_MIXTURE = re.compile(
    r"\bmoe\b|\d+x\d+(?:\.\d+)?b|a\d+(?:\.\d+)?b\b|expert|specul|draft|medusa|eagle|batch|mixtral|deepseek|gpt-oss",
    re.I,
)
_ELSEWHERE = re.compile(r"\bcpu\b|metal|vulkan|blas\b|\brpc\b", re.I)
_OTHER_TOKENS = re.compile(r"output|generat|decode|concurren|request|prompt|new tokens|max_tokens|users|stream", re.I)


def tokens_over_time(context: Context) -> list[Finding]:
    """tokens/s × seconds against batch, length and token counts stated with them."""
    found = []
    for claim in context.claims:
        if claim.kind != "token_rate" or claim.quantity.bound or claim.quantity.high is not None:
            continue
        times = _times_with(context, claim)
        if len(times) != 1:
            continue
        time = times[0]
        dims: dict[str, int] = {}
        for scope in context.report.scopes(claim.place):
            dims = {**scope.dims, **dims}
        counts: dict[str, int] = {n: dims[n] for n in ("batch", "seq", "tokens") if n in dims}
        if not counts:
            continue
        tokens = claim.quantity.span * time.quantity.span
        value = claim.quantity.value * time.quantity.value
        said = f"{claim.quantity.text} × {time.quantity.text} = {value:,.4g} tokens"
        names = list(counts)
        products = [tuple(n for i, n in enumerate(names) if mask >> i & 1) for mask in range(1, 2 ** len(names))]
        fit = next(
            (p for p in products if tokens.widened(0.01).lo <= prod(counts[n] for n in p) <= tokens.widened(0.01).hi),
            None,
        )
        if fit is not None:
            told = " × ".join(f"{n} {counts[n]}" for n in fit)
            found.append(context.finding(claim, POSSIBLE, "tokens_over_time", f"{said} = {told}"))
            continue
        groups: tuple[tuple[str, ...], ...] = (("tokens",), ("batch", "seq"))
        full = [p for p in groups if set(p) <= counts.keys()]
        around = " ".join(s.text for s in context.report.by_section.get(claim.place.section, []))
        told = "; ".join(f"{' × '.join(p)} = {prod(counts[n] for n in p)}" for p in full)
        if len(full) == 1 and not _OTHER_TOKENS.search(around):
            limit = prod(counts[n] for n in full[0]) / time.quantity.value
            found.append(
                context.finding(
                    claim,
                    INCONSISTENT,
                    "tokens_over_time",
                    f"{said}, but {told}",
                    claim.quantity.value,
                    limit,
                    "tokens/s",
                )
            )
        else:
            text = f"{said}; which tokens are counted is not stated" + (f" ({told})" if told else "")
            found.append(context.finding(claim, NOT_CHECKABLE, "tokens_over_time", text))
    return found


def _times_with(context: Context, claim: Claim) -> list[Claim]:
    """The one time of the claim's row or block."""
    place = claim.place
    if place.table is not None and place.row is not None:
        typed = context.report.tables[place.table]
        cells = [context.in_cell(place.table, place.row, c.index) for c in typed.of_kind("time") if not c.statistic]
        return [c for c in cells if c is not None and c.is_run]
    if place.kind not in ("list", "fence"):
        return []
    return [c for c in context.by_block.get(place.block, []) if c.kind == "time" and c.is_run]


def weights_per_token(context: Context) -> list[Finding]:
    """A dense model generating one sequence reads all its weights for each token: size × tokens/s <= bandwidth."""
    found = []
    for claim in context.claims:
        place = claim.place
        if claim.kind != "token_rate" or place.table is None or place.row is None:
            continue
        typed = context.report.tables[place.table]
        row = " | ".join(typed.table.rows[place.row])
        heads = claim.column.header if claim.column else ""
        if (
            not _GENERATION.search(f"{row} {heads}")
            or _MIXTURE.search(f"{row} {' '.join(typed.table.header)}")
            or _ELSEWHERE.search(row)
        ):
            continue
        sizes = [
            q
            for c in typed.of_kind("bytes")
            if re.search(r"size", c.header, re.I) and (q := typed.at(place.row, c)) is not None
        ]
        limit, cache, _ = context.report.memory_limit(place)
        if len(sizes) != 1 or limit is None:
            continue
        size = sizes[0]
        # Embedding rows are looked up, not read whole; a twentieth of a small model at most.
        needed = (0.9 * size.interval.lo - cache) * claim.quantity.interval.lo
        shown = claim.quantity.value * size.value
        text = f"{size.text} of weights × {claim.quantity.text}/s = {show('byte_rate', shown)}"
        if needed > limit.value:
            text += (
                f", more than {show('byte_rate', limit.value)} ({limit.why}) even if a tenth of the weights is not read"
            )
            found.append(
                context.finding(claim, IMPOSSIBLE, "weights_per_token", text, shown / 1e9, limit.value / 1e9, "GB/s")
            )
        else:
            text += f", {shown / limit.value:.1%} of {show('byte_rate', limit.value)}"
            found.append(
                context.finding(claim, POSSIBLE, "weights_per_token", text, shown / 1e9, limit.value / 1e9, "GB/s")
            )
    return found
