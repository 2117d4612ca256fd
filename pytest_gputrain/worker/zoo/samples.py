"""Gives samples the varied lengths, and ids the frequencies, of a real data set."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

SHORTEST: Final = 8
"""The longest sample has this many times the tokens of the shortest. This is an assumption, as is that lengths are spread
evenly between them: the mean is 9/16 of the longest, and 7/16 of a batch that is padded to it are padding."""

_STEPS: Final = 2**31
"""Random numbers are drawn as integers below it."""


def spread_lengths(longest: int, count: int) -> list[int]:
    """Return the lengths of ``count`` samples, evenly spaced from all of ``longest`` down to an eighth of it.

    Every batch has the same: its steps, runs and processes then do the same work, in the memory of the longest.
    """
    shortest = max(1, longest // SHORTEST)
    return [longest - round((longest - shortest) * number / max(1, count - 1)) for number in range(count)]


def real_tokens(lengths: list[int], longest: int, device: torch.device) -> Tensor:
    """Return which tokens of samples of these lengths are no padding: (samples, longest) bool, padded at the end."""
    return torch.arange(longest, device=device) < torch.tensor(lengths, device=device).unsqueeze(1)


def packed_positions(rows: int, length: int, device: torch.device) -> Tensor:
    """Return the position of every token within its sample, (rows, length) int64. Samples fill a row one after the other.

    Their lengths are drawn evenly from an eighth of ``length`` to all of it. A sample is cut where its row ends, and the
    next row begins with another.
    """
    most = -(-length // max(1, length // SHORTEST))
    lengths = torch.randint(max(1, length // SHORTEST), length + 1, (rows, most), device=device)
    ends = lengths.cumsum(1)
    places = torch.arange(length, device=device).repeat(rows, 1)
    sample = torch.searchsorted(ends, places, right=True)
    starts = (ends - lengths).gather(1, sample)
    return places - starts


def zipf(count: int, size: tuple[int, ...], exponent: float, device: torch.device) -> Tensor:
    """Draw ids (``size``, int64) from 0 to ``count`` - 1, the frequency of an id being (id + 1) ** -exponent, nearly.

    By the inverse of that density's integral, which takes no table of ``count`` frequencies.
    """
    share = torch.randint(0, _STEPS, size, device=device).double() / _STEPS
    if exponent == 1:
        ranks = (count + 1) ** share
    else:
        rest = 1 - exponent
        ranks = (1 + share * ((count + 1) ** rest - 1)) ** (1 / rest)
    # Rounding may give the end of the range itself, which is no index.
    return (ranks.long() - 1).clamp(0, count - 1)
