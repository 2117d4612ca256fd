"""Defines the records of expected seconds: the calls of a step, what a GPU sustains, and the estimate made of both."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final, Literal

from msgspec import Struct, field

from pytest_gputrain.records.whole import Whole

Part = Literal["matrix products", "attention", "convolutions", "pointwise", "optimizer", "communication"]
"""The parts of a step on the GPU. ``pointwise`` is all other traffic of memory: normalizations, losses and copies, too."""

LIKELY: Final = (0.85, 1.25)
"""The interval as multiples of the estimate, on a board whose rates were measured: it held for 17 of 19 steps
that were left out of the fit, and for 14 with their whole family of models left out."""
ROUGH: Final = (0.7, 2.0)
"""The interval, as multiples of the estimate, on a board of which only public rates are known. It was chosen beforehand, and
held for 86 of 98 published steps. An interval fitted to the steps of the other boards held for 72."""


class TracedCall(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The calls of one operator in a step with arguments of the same shapes and types."""

    operator: str
    """The name of the operator without the namespace ``aten``: ``mm``, ``_foreach_add_``, ``mylibrary.myoperator``."""
    shapes: tuple[tuple[Whole, ...], ...] = ()
    """The shapes of its first four tensors; empty if it has no FLOPs, and of other libraries' operators."""
    dtype: str = ""
    """The type of its first tensor: ``bf16``, ``fp16``, ``fp32``, ``float64``."""
    flags: tuple[str, ...] = ()
    """The properties of the call that decide which kernel runs: ``causal``, ``masked``, ``tf32`` (allowed),
    ``channels_last``, ``view`` (moves nothing), ``list`` (many tensors in one kernel), ``optimizer`` (within its step),
    ``grouped`` (a convolution), ``host`` (a copy from the host or to it)."""
    count: Whole = 1
    flops: Whole = 0
    """Floating-point operations of one call."""
    read: Whole = 0
    """Bytes that one call reads."""
    written: Whole = 0
    """Bytes that one call writes."""


class Rates(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a board computes and moves at most, and which share of it kernels sustain."""

    board: str
    """The catalog marker of the board."""
    flops: dict[str, float]
    """Peak FLOP/s by arithmetic: ``fp32``, ``tf32``, ``bf16``, ``fp16``. What the board lacks or the vendor does not tell is
    missing. Without ``tf32`` it computes in fp32."""
    bandwidth: float
    """Bytes per second of the device memory."""
    multiprocessors: int
    kinds: dict[str, float]
    """The sustained rates by kind of kernel, as rates.toml names it: shares of a peak, microseconds, or bytes."""
    measured: bool
    """Whether the figures were measured on such a board for this purpose; otherwise they are public ones, and rough."""


class ExpectedTime(Struct, frozen=True, kw_only=True):
    """The estimate of how long a step takes on a GPU that is not here. It is never compared with a measured time."""

    seconds: float | None
    """The estimate, the larger of the GPU's seconds and the host's; None if there is none, and ``unknown`` says why."""
    low: float | None = None
    """The lower end of the interval."""
    high: float | None = None
    """The upper end of the interval."""
    rough: bool = False
    """Whether only public rates of the board are known, so that the interval is wide."""
    parts: dict[Part, float] = field(default_factory=dict)
    """Seconds of the GPU by part; of communication those that computation does not hide."""
    host_seconds: float = 0.0
    """The time that the host needs to call all operators, with a CPU as that of the GPU whose rates are known."""
    not_modelled: dict[str, float] = field(default_factory=dict)
    """Operators whose kernels are not known, with their share of the GPU's seconds if they did nothing but move their
    bytes."""
    unknown: str = ""
    """Why there is no estimate, as the rest of a sentence."""

    @property
    def gpu_seconds(self) -> float:
        """Return the seconds that the GPU computes and copies, without communication."""
        return sum(seconds for part, seconds in self.parts.items() if part != "communication")

    @property
    def host_bound(self) -> bool:
        """Tell whether the GPU waits for the host."""
        return self.seconds is not None and self.host_seconds > self.gpu_seconds

    @property
    def dominant(self) -> tuple[Part | Literal["host"], float] | None:
        """Return the part that takes longest, with its share of the GPU's seconds. If the step waits for the host, this is
        ``host`` with the share in which the GPU waits. None if nothing is known."""
        if self.host_bound:
            return "host", 1 - self.gpu_seconds / self.host_seconds
        part = max(self.parts, key=self.parts.__getitem__, default=None)
        whole = sum(self.parts.values())
        return (part, self.parts[part] / whole) if part and whole else None


def slowest(estimates: Iterable[ExpectedTime | None]) -> ExpectedTime | None:
    """Return the estimate of the process that takes longest, because the others wait for it; one without an estimate counts
    as longest."""
    known = filter(None, estimates)
    return max(known, key=lambda one: math.inf if one.seconds is None else one.seconds, default=None)
