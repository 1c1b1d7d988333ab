"""Colours moved until they stand out from a background, by the contrast of WCAG 2.1."""


def readable(colour: str, card: str, least: float = 3.0) -> str:
    """`colour`, moved towards white or black until its contrast with `card` is at least `least` : 1."""
    target = 0 if _luminance(card) > 0.5 else 255
    channels = _channels(colour)
    for share in range(0, 101, 5):
        moved = [round(c + (target - c) * share / 100) for c in channels]
        text = "#" + "".join(f"{c:02x}" for c in moved)
        if contrast(text, card) >= least:
            break
    return text


def contrast(first: str, second: str) -> float:
    """Contrast ratio of two colours, 1 to 21 (WCAG 2.1)."""
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (v / 255 for v in _channels(colour))]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
