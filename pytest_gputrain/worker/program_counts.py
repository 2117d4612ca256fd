"""Counts the work that a program of the user's gives to emulated GPUs: in its whole run, and from one update to the next.

With ``--expect`` it estimates instead how long these steps take.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import defaultdict, deque
from pathlib import Path
from types import FrameType
from typing import Any, Final

import msgspec
import torch

from pytest_gputrain.hardware.step_time import NOT_COMPILED, expected_time
from pytest_gputrain.records import CountCause, Place, Rates, TracedCall
from pytest_gputrain.worker.counted_steps import compiled, counts_of
from pytest_gputrain.worker.emulated_values.program_lines import describe_line, name_of_file, own_frame
from pytest_gputrain.worker.flops import count_flops
from pytest_gputrain.worker.own_lines import OwnLines, own_place
from pytest_gputrain.worker.step_counts import Rows, StepCounter
from pytest_gputrain.worker.threads import countable_threads
from pytest_gputrain.worker.work import WorkCount

MOST_STEPS: Final = 50
"""Steps of a program that are kept one by one, its first. Each may be of a kind of its own."""
LAST_STEPS: Final = 5
"""Steps of a program whose time is estimated, its last."""


class ProgramCounter(StepCounter):
    """Counts the work that this process gives to its emulated GPUs, from its first use of one.

    A step ends with each update of an optimizer, or where a trainer of a library tells so. The time before the first step is
    part of the whole run alone.
    """

    def __init__(self) -> None:
        super().__init__(_ProgramLines([]))
        self._whole: defaultdict[CountCause, tuple[int, int]] = defaultdict(lambda: (0, 0))
        self._described: dict[str, Place] = {}
        self._by_frame: dict[tuple[str, int], str] = {}
        self._clock: weakref.ref[Any] | None = None
        """The optimizer whose updates end steps."""
        self._others_since: weakref.WeakSet[Any] = weakref.WeakSet()
        """Other optimizers that have updated since the step began."""
        self._has_updated = False
        self.begin_step()

    def updated(self, optimizer: Any, *, ends_step: bool = True) -> None:
        """Record that an optimizer has updated.

        Args:
            ends_step: whether that may end a step. It does if no other optimizer updates more often.
        """
        self._has_updated = True
        if not ends_step:
            return
        clock = self._clock() if self._clock is not None else None
        if clock is not None and clock is not optimizer and optimizer not in self._others_since:
            self._others_since.add(optimizer)
            return
        self.next_step(kept=clock is not None)
        self._clock = weakref.ref(optimizer)

    def next_step(self, *, kept: bool = True) -> None:
        """Note that a step ends and the next one begins.

        Args:
            kept: whether it was a step; otherwise it is part of the whole run alone.
        """
        rows = self.end()
        self._add(rows)
        if kept and self.steps < MOST_STEPS:
            self.add(*rows, update=self._has_updated)
        self._has_updated = False
        self._others_since.clear()
        self.begin_step()

    def report(self) -> dict[str, Any]:
        """Stop counting. Return the counts of all threads over the whole run, and those of the first steps.

        A record of an `EmulatedProcess` has these fields.
        """
        self._add(self.end())
        whole = counts_of(self._whole, self.lines_unknown)
        return {name: msgspec.to_builtins(counts) for name, counts in (("asked", whole), ("steps", self.counts())) if counts}

    def _add(self, rows: Rows) -> None:
        for counted in rows:
            for cause, (number, size) in counted.items():
                before = self._whole[cause]
                self._whole[cause] = before[0] + number, before[1] + size

    # --- Lines

    def line_of(self, frame: FrameType | None) -> str:
        """Describe the innermost line of the program in a frame's stack, in the form in which lines are noted."""
        frame = own_frame(frame)
        if frame is None:
            return ""
        code = frame.f_code
        described = self._by_frame.get((code.co_filename, frame.f_lineno))
        if described is None:
            described = describe_line(code.co_filename, frame.f_lineno, code.co_name)
            self._by_frame[code.co_filename, frame.f_lineno] = described
            place = own_place(name_of_file(code.co_filename), code.co_filename, code.co_qualname, frame.f_lineno)
            self._described[described] = place
        return described

    def place_of(self, line: str) -> Place:
        return self._described[line]


class ProgramTimer(ProgramCounter):
    """Estimates how long the last steps of this process would take on a GPU, from the calls of their operators.

    It follows each operator by a dispatch mode of torch, whose own work would be counted as the program's. So it counts
    nothing.

    Args:
        rates: what the GPU sustains, as JSON; null if that is not known.
    """

    def __init__(self, rates: str) -> None:
        self._rates = msgspec.json.decode(rates, type=Rates | None)
        self._last: deque[list[TracedCall]] = deque(maxlen=LAST_STEPS)
        self._work = _WorkOfProgram(lambda: "")
        super().__init__()
        self._processes = 1
        # The context is never left. At the program's end another mode of the program may be the innermost one, and modes
        # must be left in turn.
        self._following = contextlib.ExitStack()
        self._following.enter_context(countable_threads())
        self._following.enter_context(count_flops(self._work))

    def begin_step(self) -> None:
        self._work.forget_calls()

    def next_step(self, *, kept: bool = True) -> None:
        if kept:
            self._last.append(self._work.calls())
            distributed = torch.distributed
            if distributed.is_available() and distributed.is_initialized():
                self._processes = distributed.get_world_size()
        self._others_since.clear()
        self.begin_step()

    def report(self) -> dict[str, Any]:
        """Return the median of the estimates for the last steps, as a record of an `EmulatedProcess`."""
        lacking, processes = self._why_unknown(), self._processes
        every = (expected_time(calls, self._rates, processes=processes, lacking=lacking) for calls in self._last or [()])
        estimates = sorted(every, key=lambda one: one.seconds or 0.0)
        return {"expected": msgspec.to_builtins(estimates[len(estimates) // 2])}

    def _why_unknown(self) -> str:
        """Say why the recorded calls differ from the calls of the steps on a GPU; empty if they do not."""
        if compiled()[0]:
            return NOT_COMPILED
        if self._work.launches_graphs:
            return "the program launches CUDA graphs, whose operators are not seen; run it without them"
        if self._work.trouble:
            return f"pytest-gputrain failed to follow an operator ({self._work.trouble})"
        return "" if self._last else "a step goes from one update of an optimizer to the next, and there were fewer than two"


class _WorkOfProgram(WorkCount):
    """Counts the work of a program and lets it compile, so that it takes the same memory as without counting."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch.compile that it may compile while this counts."""
        return True


class _ProgramLines(OwnLines):
    """Counts each file that belongs to no library as the program's own."""

    def _name(self, file: str) -> str:
        if Path(file).is_relative_to(_PACKAGE):
            return super()._name(file)
        return name_of_file(file)


_PACKAGE: Final = Path(os.path.abspath(__file__)).parents[1]
