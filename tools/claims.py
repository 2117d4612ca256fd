"""Shared code of the simulations of this folder: rows of claims with what was measured beside them, and their bounds."""

from __future__ import annotations

import argparse
import math
import secrets
from collections.abc import Iterable
from typing import Final, NamedTuple

ONE_SIDED: Final = 2.326
"""Standard deviations of a normal distribution below which 99 % lie."""


class Row(NamedTuple):
    """A claim; it holds where its one-sided 99 % bound does."""

    setting: str
    claim: str
    measured: float
    bound: float
    limit: float | None
    """The limit of the bound; None if nothing is claimed."""
    at_least: bool = False
    unit: str = ""
    digits: int = 2

    @property
    def holds(self) -> bool:
        if self.limit is None:
            return True
        return self.bound >= self.limit if self.at_least else self.bound <= self.limit


def wilson(share: float, count: int, *, upper: bool) -> float:
    """Return the one-sided 99 % bound of a share of ``count`` (Wilson 1927)."""
    z = ONE_SIDED
    middle, half = share + z**2 / (2 * count), z * math.sqrt(share * (1 - share) / count + z**2 / (4 * count**2))
    return (middle + (half if upper else -half)) / (1 + z**2 / count)


def parser(description: str | None, *, replicates: int, rules: Iterable[str], default: str) -> argparse.ArgumentParser:
    """Return the parser of a simulation's options: ``replicates``, ``seed`` and ``rule``."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--replicates", type=int, default=replicates, help=f"of a setting (default: {replicates})")
    made.add_argument("--seed", type=int, default=secrets.randbits(32), help="of the simulation (default: a fresh one)")
    made.add_argument(
        "--rule", choices=sorted(rules), default=default, help=f"{default} is the product's; the others are broken"
    )
    return made


def report(rows: Iterable[Row], setting_width: int, claim_width: int) -> int:
    """Print the rows as they come; 1 where a claim fails, or 0."""
    print(f"     {'setting':<{setting_width}} {'claim':<{claim_width}} {'measured':>9} {'99 % bound':>10}")
    failed = False
    for row in rows:
        failed |= not row.holds
        word = "    " if row.limit is None else "ok  " if row.holds else "FAIL"
        measured, bound = (f"{value:.{row.digits}f}{row.unit}" for value in (row.measured, row.bound))
        print(f"{word} {row.setting:<{setting_width}} {row.claim:<{claim_width}} {measured:>9} {bound:>10}", flush=True)
    return int(failed)
