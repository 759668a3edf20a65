"""Sizes as people write and read them.

Law: pure. GiB and Gi are powers of 1024, GB and G powers of 1000, as everywhere else; a bare number is bytes.
"""

from __future__ import annotations

import re

_POWERS = "KMGTP"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([KMGTP])(i?))?B?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes. Raises ValueError for what is no size."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise ValueError(f"{text!r} is no size; write 8GiB, 80GB, 512MiB or a number of bytes")
    number, letter, binary = found.groups()
    power = _POWERS.index(letter.upper()) + 1 if letter else 0
    return int(float(number) * (1024 if binary else 1000) ** power)


def show_size(number: int) -> str:
    """Three or four digits and a binary unit: 131072 is "128 KiB"."""
    value, unit = float(number), "B"
    for larger in _POWERS:
        if value < 1024:
            break
        value, unit = value / 1024, f"{larger}iB"
    text = f"{value:.2f}".rstrip("0").rstrip(".") if value < 100 else f"{value:.0f}"
    return f"{text} {unit}"


def parse_count(text: str) -> int:
    """A number of tokens: 8192, 8_192, 8K, 128K (times 1024, as contexts are counted). Raises ValueError."""
    found = re.fullmatch(r"(-?\d+)\s*([KM]?)", text.strip().replace("_", "").replace(",", ""), re.IGNORECASE)
    if not found:
        raise ValueError(f"{text!r} is no number of tokens; write 8192 or 8K")
    return int(found[1]) * {"": 1, "K": 1024, "M": 1024 * 1024}[found[2].upper()]
