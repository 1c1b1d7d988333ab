"""What a percentage "of peak" may be a percentage of."""

from __future__ import annotations

from expertile.lab.audit.context import Context
from expertile.lab.audit.quantities import show
from expertile.lab.audit.report import Place

# Datasheets state some peaks at a lower clock (an H100's 989 is at 1.83 GHz), with float16 accumulation, or sparse.
_FACTORS = (1.0, 0.924, 0.5, 2.0, 1.848)


def stated_and_known_peaks(context: Context, place: Place, kind: str) -> list[tuple[float, str]]:
    """(peak, words): those the text states, then those of the GPUs at `place`, the format in force there first.

    `kind` is "flop_rate" or "byte_rate"; several GPUs that worked together count singly and together.
    """
    found = [
        (c.quantity.value, f"{show(kind, c.quantity.value)} (line {c.place.line})")
        for c in context.limits
        if c.kind == kind
    ]
    known, _ = context.report.devices(place)
    formats = context.report.formats(place)
    for factor in _FACTORS if kind == "flop_rate" else (1.0,):
        for gpus in sorted({1, context.report.gpus(place)}):
            several = f"{gpus} × " if gpus > 1 else ""
            for d in known:
                peaks = d.peak_flops if kind == "flop_rate" else {"": d.memory_bps or 0.0}
                for key in sorted(peaks, key=lambda k: k not in formats):
                    whole = peaks[key] * factor * gpus
                    name = f"{several}{d.name} {key}".strip()
                    if whole:
                        found.append((whole, f"{show(kind, whole)} ({name})"))
    return found
