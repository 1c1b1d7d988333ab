"""What every marker of a chart looks like; the script of HTML reports has the same `outlines`."""

import math

SIZE = 4.6  # of a marker, from its middle


def _polygon(corners: int, turn: float = 0.0, inner: float = 1.0) -> tuple[tuple[float, float], ...]:
    """Unit polygon with a corner at the top; with `inner` < 1 a star."""
    count = corners if inner == 1.0 else 2 * corners
    angles = [2 * math.pi * i / count - math.pi / 2 + turn for i in range(count)]
    radii = [inner if inner < 1.0 and i % 2 else 1.0 for i in range(count)]
    return tuple((r * math.cos(a), r * math.sin(a)) for a, r in zip(angles, radii, strict=True))


POLYGONS = {
    "square": _polygon(4, math.pi / 4),
    "diamond": _polygon(4),
    "triangle-up": _polygon(3),
    "triangle-down": _polygon(3, math.pi),
    "pentagon": _polygon(5),
    "hexagon": _polygon(6),
    "star": _polygon(5, inner=0.45),
    "star-square": _polygon(4, inner=0.45),
    "star-hexagon": _polygon(6, inner=0.5),
    "octagon": _polygon(8),
    "star-triangle-up": _polygon(3, inner=0.4),
    "bowtie": ((-1, -0.8), (1, 0.8), (1, -0.8), (-1, 0.8)),
    "hourglass": ((-0.8, -1), (0.8, -1), (-0.8, 1), (0.8, 1)),
}
STROKES = {"cross": ((1, 0), (0, 1)), "x": ((0.75, 0.75), (-0.75, 0.75))}


def outlines() -> dict[str, str]:
    """The SVG path of every marker by its name, around the origin; what is not closed ("Z") is drawn with strokes."""
    size, r = SIZE, 0.85 * SIZE
    found = {"circle": f"M{-r:.1f} 0a{r:.1f} {r:.1f} 0 1 0 {2 * r:.1f} 0a{r:.1f} {r:.1f} 0 1 0 {-2 * r:.1f} 0Z"}
    for name, corners in POLYGONS.items():
        found[name] = "M" + "L".join(f"{x * size:.1f} {y * size:.1f}" for x, y in corners) + "Z"
    for name, strokes in STROKES.items():
        ends = ((x * size, y * size) for x, y in strokes)
        found[name] = "".join(f"M{-x:.1f} {-y:.1f}L{x:.1f} {y:.1f}" for x, y in ends)
    return found
