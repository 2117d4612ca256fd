"""Damage for sound files: bytes and JSON values changed at random."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any, Final

ODD: Final[tuple[Any, ...]] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    -0.0,
    1e-320,
    1e308,
    -1e308,
    2**63,
    -(2**63) - 1,
    10**400,
    0.5,
    float("nan"),
    float("inf"),
    "",
    " ",
    "0",
    "-1",
    "x",
    "..",
    "../../etc/passwd",
    "/",
    "a/b",
    "a\x00b",
    "a\nb",
    "\r",
    "\x1b[2J",
    "\u202e",
    "[bold]",
    "<script>alert(1)</script>",
    "::error::x",
    "=1+1",
    "%s%n{0}",
    "e\u0301" * 40,
    "9" * 400,
    "2026-01-01T00:00:00Z",
    [],
    {},
    [[]],
    [None],
    {"": None},
    [0.1, 0.2],
)
"""Values that have broken readers of others."""

DEEP: Final = 3000


def damaged(rng: random.Random, samples: Sequence[bytes], *, structured: bool) -> bytes:
    """Return a sample with something changed, or random bytes.

    Args:
        structured: whether the samples are JSON, of which a value may be changed.
    """
    kind = rng.random()
    if kind < 0.03:
        return rng.randbytes(rng.randrange(200))
    sample = rng.choice(samples)
    if structured and kind < 0.75:
        return _restructured(rng, sample)
    if structured and kind < 0.76:
        return _nested(rng, sample)
    return _scrambled(rng, sample, samples)


def _scrambled(rng: random.Random, sample: bytes, others: Sequence[bytes]) -> bytes:
    data = bytearray(sample)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        at, to = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
        begin, end = min(at, to), max(at, to)
        match rng.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 1:
                data[at:at] = rng.randbytes(rng.randrange(1, 5))
            case 2:
                del data[at : at + rng.randrange(1, 20)]
            case 3:
                del data[begin:end]
            case 4:
                data[at:at] = data[begin : min(end, begin + 2000)]
            case 5:
                other = rng.choice(others)
                data[begin:end] = other[: rng.randrange(len(other) + 1)][-2000:]
            case 6:
                del data[at:]
            case _:
                odd = rng.choice(
                    (b"\n<<<<<<< HEAD\n", b"\xff\xfe", b"\x00", b"NaN", b"1e999", b"\xed\xa0\x80", b'"', b"}", b"\n")
                )
                data[at:at] = odd
    return bytes(data)


def _restructured(rng: random.Random, sample: bytes) -> bytes:
    lines = sample.splitlines() if b"\n{" in sample.strip() and not sample.startswith(b"{\n") else [sample]
    place = rng.randrange(len(lines))
    document = json.loads(lines[place])
    places = list(_places(document))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        holder, key = rng.choice(places)
        kind = rng.randrange(10)
        old = _at(holder, key)
        if isinstance(old, int | float) and not isinstance(old, bool) and abs(old) < 1e300 and rng.random() < 0.7:
            _put(holder, key, rng.choice((-old, 0, 0.0, 1, old * 1e9, round(old * 1e12), old + 1, old / 3, 1e-300, 1e300)))
            continue
        if isinstance(holder, dict) and key in holder and kind == 0:
            del holder[key]
        elif isinstance(holder, dict) and kind == 1:
            holder[rng.choice(("", "x", "format", "a\nb", "../x", "outcome"))] = rng.choice(ODD)
        elif isinstance(holder, list) and kind == 2:
            holder *= rng.randrange(3)
        elif kind == 3:
            _put(holder, key, _at(*rng.choice(places)))
        else:
            _put(holder, key, rng.choice(ODD))
    try:
        lines[place] = json.dumps(document).encode()
    except (ValueError, RecursionError):  # a value was put into itself
        return lines[place][: rng.randrange(len(lines[place]))]
    return b"\n".join(lines) + (b"\n" if sample.endswith(b"\n") else b"")


def _nested(rng: random.Random, sample: bytes) -> bytes:
    """Return JSON that is nested too deep for recursion."""
    opening, closing = rng.choice(((b"[", b"]"), (b'{"x":', b"}")))
    deep = opening * DEEP + b"1" + closing * DEEP
    at = sample.find(b":", rng.randrange(len(sample) + 1)) + 1
    return deep if rng.random() < 0.2 or not at else sample[:at] + deep + b"," + sample[at:]


def _places(value: Any, holder: Any = None, key: Any = None) -> Iterator[tuple[Any, Any]]:
    if holder is not None:
        yield holder, key
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _places(inner, value, name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _places(inner, value, index)


def _at(holder: Any, key: Any) -> Any:
    try:
        return holder[key]
    except (KeyError, IndexError):
        return None


def _put(holder: Any, key: Any, value: Any) -> None:
    if isinstance(holder, dict) or key < len(holder):
        holder[key] = value
