"""Counts the work that each timed step gives to an emulated GPU, and finds the lines of code that cause it."""

from __future__ import annotations

import ctypes
import functools
from collections import defaultdict
from typing import Any, Final, NamedTuple, cast

from pytest_gputrain.records import CountCause, CountName, Place, SlowClass
from pytest_gputrain.worker.counted_steps import Causes, CountedSteps, compiled
from pytest_gputrain.worker.gpu_events import short_name
from pytest_gputrain.worker.own_lines import OwnLines
from pytest_gputrain.worker.python_frames import LayoutUnknown, read_frames, stack, text

_OTHER_THREAD: Final = 1


class _Row(NamedTuple):
    """One count of the stand-ins: what was counted, and the place in the code that caused it."""

    what: CountName
    by: str
    slow: str
    shape: str
    stack: int
    noted: int
    thread: int
    backward: int
    replayed: int
    number: int
    size: int


class Rows(NamedTuple):
    """The counts of a step."""

    judged: Causes
    others: Causes
    """The causes in other threads than the training's."""


class StepCounter(CountedSteps):
    """Counts the timed steps of this process, which runs on an emulated GPU.

    Args:
        lines: finds the user's own lines; None for a case without own code.
    """

    def __init__(self, lines: OwnLines | None) -> None:
        super().__init__(lines)
        # PyDLL keeps the GIL during a call, because calls are too short to give it away.
        self._library: Any = ctypes.PyDLL(None)
        try:
            read_frames(self._library)
        except LayoutUnknown as error:
            self.lines_unknown = str(error)
        self._captures = ctypes.c_int.in_dll(self._library, "gputrain_captures")
        self._noted: dict[str, int] = {}
        """The number of each line that was noted for a backward pass, from 1."""
        self._places: dict[int, tuple[Place | None, Place | None, bool]] = {}
        """The own line and the library's of each stack, and whether this package's measuring asks."""
        self._counting = False

    def note(self, line: str) -> None:
        """Set the line of the user's code to which this thread's requests in a backward pass belong, until another line is
        set."""
        # Replays are counted with the lines of their capture, so lines matter in a capture, too.
        if self._counting or self._captures.value:
            number = self._noted.setdefault(line, len(self._noted) + 1) if line else 0
            self._library.gputrain_counters_note(number)

    def begin_step(self) -> None:
        """Note that a step starts on this thread."""
        self.compiled = compiled()
        self._counting = True
        self.begin_asked()
        self._library.gputrain_counters_begin()

    def end_step(self, *, update: bool) -> None:
        """Note that the step has ended.

        Args:
            update: whether the optimizer was to update at its end.
        """
        self.add(*self.end(), update=update)

    def end_further_step(self, *, update: bool) -> int | None:
        """Note that a step after the timed ones has ended. Return the kind of the timed steps with the same counts; None if
        there are none.

        Args:
            update: whether the optimizer was to update at its end.
        """
        return self.kind_of(self.end().judged, update=update)

    def end(self) -> Rows:
        """Stop counting, and return the counts since the step began."""
        self._library.gputrain_counters_end()
        self._counting = False
        judged: defaultdict[CountCause, tuple[int, int]] = defaultdict(lambda: (0, 0))
        others: defaultdict[CountCause, tuple[int, int]] = defaultdict(lambda: (0, 0))
        noted = list(self._noted)
        for line in text(self._library.gputrain_counters_rows).splitlines():
            what, by, slow, shape, *numbers = line.split("\t")
            row = _Row(cast("CountName", what), by, slow, shape, *map(int, numbers))
            own, library, is_ours = self._places_of(row.stack)
            if is_ours:
                continue
            if row.noted:
                own = self.place_of(noted[row.noted - 1])
            cause = CountCause(
                what=row.what,
                by=_short_name(row.by) if what == "launches" else row.by,
                own=own,
                library=library,
                backward=bool(row.backward),
                replayed=bool(row.replayed),
                shape=row.shape,
                slow=cast("SlowClass | None", row.slow or None),
                counts=(),
            )
            kept = others if row.thread == _OTHER_THREAD else judged
            count, size = kept[cause]
            kept[cause] = count + row.number, size + row.size
        for cause in self.compiled_since():
            judged[cause] = judged[cause][0] + 1, 0
        return Rows({**judged, **self.end_asked()}, others)

    # --- Lines

    def _places_of(self, number: int) -> tuple[Place | None, Place | None, bool]:
        if number not in self._places:
            self._places[number] = self.places(stack(self._library, number))
        return self._places[number]


@functools.cache
def _short_name(mangled: str) -> str:
    """Return the short name of a kernel."""
    library: Any = ctypes.CDLL("libstdc++.so.6")
    library.__cxa_demangle.restype = ctypes.c_void_p
    pointer = library.__cxa_demangle(mangled.encode(), None, None, None)
    name = ctypes.string_at(pointer).decode("utf-8", "replace") if pointer else mangled
    return short_name(name)
