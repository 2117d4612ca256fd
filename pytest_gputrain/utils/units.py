"""Formats bytes, seconds, ratios and topologies as text, and parses what people type."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Final

KiB: Final = 1024
MiB: Final = 1024**2
GiB: Final = 1024**3

_MOST: Final = 2**63 - 1
"""The highest value, as for `Whole`."""

_BYTE_UNITS: Final = {"b": 1, "kib": KiB, "mib": MiB, "gib": GiB, "kb": 10**3, "mb": 10**6, "gb": 10**9}


def format_bytes(count: float) -> str:
    """Format ``count`` bytes in the largest binary unit that keeps it at or above one: ``35.6 GiB``."""
    for name, size in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(count) >= size:
            return f"{_digits(count / size)} {name}"
    return f"{count:.0f} B"


def format_seconds(seconds: float) -> str:
    """Format ``seconds`` with three significant digits in s, ms or µs."""
    for name, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{_digits(seconds / size)} {name}"
    return f"{_digits(seconds / 1e-6)} µs"


def format_spread(seconds: float, spread: float) -> str:
    """Return ``4.70 s +- 0.03``, where the spread has the unit and the decimals of the value."""
    return f"{format_seconds(seconds)} +- {_like(seconds, spread)}"


def format_interval(seconds: float, low: float, high: float) -> str:
    """Return ``4.70 s (4.00 to 5.88)``, where both ends have the unit and the decimals of the value."""
    return f"{format_seconds(seconds)} ({_like(seconds, low)} to {_like(seconds, high)})"


def _like(seconds: float, other: float) -> str:
    """Return ``seconds`` in the unit and with the decimals of ``other``."""
    shown, unit = format_seconds(seconds).split(" ")
    size = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[unit]
    return f"{other / size:,.{len(shown.partition('.')[2])}f}"


def format_flops(count: float) -> str:
    """Format ``1.25 TFLOP``."""
    for name, size in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9), ("MFLOP", 1e6)):
        if abs(count) >= size:
            return f"{_digits(count / size)} {name}"
    return f"{count:.0f} FLOP"


def format_joules(joules: float) -> str:
    """Format ``1.25 kJ``."""
    return f"{_digits(joules / 1000)} kJ" if abs(joules) >= 1000 else f"{_digits(joules)} J"


def format_rate(per_second: float) -> str:
    """Format ``4.34/s`` with three significant digits."""
    return f"{_digits(per_second)}/s"


def _digits(value: float) -> str:
    """Return a number with three significant digits and never an exponent."""
    decimals = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:,.{decimals}f}"


def format_percent(ratio: float, *, signed: bool = True) -> str:
    """Return ``0.051`` as ``+5.1 %``. A small change keeps a significant digit, so that it never reads as no change."""
    percent = 100 * ratio
    form = ".1f" if abs(percent) >= 0.05 or percent == 0 else ".1g"
    return f"{percent:{'+' if signed else ''}{form}} %"


def format_topology(rows: Sequence[Sequence[str]]) -> str:
    """Return ``NV18`` if all pairs of GPUs are linked in this way; else how many have which link: ``8 x NV1, 8 x NV2, 12 x
    NODE``."""
    pairs = Counter(path for number, row in enumerate(rows) for path in row[number + 1 :])
    if len(pairs) < 2:
        return "".join(pairs) or "unknown"
    return ", ".join(f"{count} x {path}" for path, count in sorted(pairs.items(), key=lambda pair: (pair[1], pair[0])))


def format_nics(ports: Sequence[str]) -> str:
    """Format ``2 x ixgbe 10 Gb/s, 8 x mlx5_core 400 Gb/sec (4X NDR)``."""
    return ", ".join(ports) or "none"


def parse_bytes(text: str) -> int:
    """Return the bytes in ``"512MiB"``, ``"2 GiB"`` or ``"1e9 B"``.

    Raises:
        ValueError: the text is not a non-negative number with a unit of bytes.
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*([kmg]?i?b)\s*", text, re.IGNORECASE)
    try:
        if match and match[2].lower() in _BYTE_UNITS:
            return round(float(match[1]) * _BYTE_UNITS[match[2].lower()])
    except (ValueError, OverflowError):
        pass
    raise ValueError(f"{text!r} is not an amount of memory; write it as 512MiB or 2GiB")


def parse_ratio(text: str) -> float:
    """Return the ratio in ``"3%"`` or ``"0.03"``.

    Raises:
        ValueError: not a number, negative, or 100 % and more without a percent sign (``3`` is surely ``3%``).
    """
    number, percent = text.strip(), False
    if number.endswith("%"):
        number, percent = number[:-1].strip(), True
    if re.fullmatch(r"[0-9]*\.?[0-9]+", number):
        ratio = float(number) / 100 if percent else float(number)
        if ratio < 1 or (percent and math.isfinite(ratio)):
            return ratio
    raise ValueError(f"{text!r} is not a tolerance; write it as 3% or 0.03")


def parse_seconds(text: str) -> float:
    """Return the seconds in ``"90"``, ``"350ms"``, ``"90s"``, ``"15min"`` or ``"2h"``.

    Raises:
        ValueError: not a positive number with one of these units.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(ms|s|min|h)?\s*", text)
    if match:
        seconds = float(match[1]) * {"ms": 1e-3, "s": 1, "min": 60, "h": 3600, None: 1}[match[2]]
        if 0 < seconds < math.inf:
            return seconds
    raise ValueError(f"{text!r} is not a time; write it as 90s, 15min or 2h")


def read_bytes(value: object) -> int:
    """Return the bytes that a marker sets: a number of them, or a text for `parse_bytes`.

    Raises:
        ValueError: neither; also a part of a byte, which was surely meant for a ratio.
    """
    amount = parse_bytes(value) if isinstance(value, str) else read_number(value)
    if amount is None or 0 < amount < 1 or amount > _MOST:
        raise ValueError(
            f"{value!r} is not an amount of memory; write it as 24 * GiB, which is a number of bytes, or '24 GiB'"
        )
    return round(amount)


def read_ratio(value: object) -> float:
    """Return the ratio that a marker sets: a number below 1, or a text for `parse_ratio`.

    Raises:
        ValueError: neither.
    """
    if isinstance(value, str):
        return parse_ratio(value)
    ratio = read_number(value)
    if ratio is None or ratio >= 1:
        raise ValueError(f"{value!r} is not a tolerance; write it as 0.05, which is a ratio below 1, or '5 %'")
    return float(ratio)


def read_seconds(value: object) -> float:
    """Return the seconds that a marker sets: a number of them, or a text for `parse_seconds`.

    Raises:
        ValueError: neither.
    """
    if isinstance(value, str):
        return parse_seconds(value)
    seconds = read_number(value)
    if not seconds:
        raise ValueError(f"{value!r} is not a time; write it as 0.5, which is a number of seconds, or '500 ms'")
    return float(seconds)


def read_number(value: object) -> int | float | None:
    """Return ``value`` if it is a finite number and not negative. A bool is not a number here."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if 0 <= value <= _MOST else None  # NaN fails this comparison, too.
