"""Counts what each timed step asks of an emulated GPU, and finds the lines that ask for it."""

from __future__ import annotations

import ctypes
import functools
import linecache
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec

from pytest_gputrain.records import CountCause, CountName, Counts, Place, SlowClass, StepCounts
from pytest_gputrain.records.counts import MOST_CAUSES, PARTS_OF_WORK, added_up
from pytest_gputrain.worker.own_lines import OwnLines, is_installed
from pytest_gputrain.worker.python_frames import LayoutUnknown, read_frames, stack, text

_PACKAGE: Final = Path(__file__).parents[1]
"""The folder as frames name it, which may be below a symbolic link."""
_HIDDEN: Final = tuple(
    str(_PACKAGE / "worker" / name)
    for name in (
        "emulated_values",
        "device_allocations.py",
        "untouched_host.py",
        "updates.py",
        "threads.py",
        "work.py",
        "step_counts.py",
        "python_frames.py",
    )
)
"""Code that stands between an operator and the stand-ins."""
_MEASURING: Final = tuple(str(_PACKAGE / "worker" / name) for name in ("device.py", "loop.py", "straggler_clock.py"))
"""Code that measures: what it asks for is no part of the training."""
_BETWEEN: Final = tuple(
    os.path.join(os.sep, "torch", *name.split("/"))
    for name in (
        "_ops.py",
        "_compile.py",
        "_dynamo/eval_frame.py",
        "_higher_order_ops/cudagraph_conditional_nodes.py",
        "utils/_python_dispatch.py",
    )
)
"""The ends of the names of torch's files that call any operator or any mode: the line outside of them tells more."""
_MOST_TEXT: Final = 120
_MOST_NAME: Final = 60
_BYTES: Final = {"h2d": "h2d_bytes", "d2h": "d2h_bytes", "d2d": "d2d_bytes", "collectives": "collective_bytes"}
"""The figure that adds up the bytes of what is counted, by the beginning of its name."""

_OTHER_THREAD: Final = 1


class _Row(NamedTuple):
    """What the stand-ins counted of one kind, from one place."""

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


class StepCounter:
    """Counts the timed steps of this process, which runs on an emulated GPU.

    Args:
        lines: finds the user's own lines; None for a case without own code.
    """

    def __init__(self, lines: OwnLines | None) -> None:
        # PyDLL keeps Python's lock in a call, and a call is short.
        self._library: Any = ctypes.PyDLL(None)
        self._lines = lines
        self._lines_unknown = ""
        try:
            read_frames(self._library)
        except LayoutUnknown as error:
            self._lines_unknown = str(error)
        self._captures = ctypes.c_int.in_dll(self._library, "gputrain_captures")
        self._noted: dict[str, int] = {}
        """The number of each line that was noted for a backward pass, from 1."""
        self._places: dict[int, tuple[Place | None, Place | None, bool]] = {}
        """The own line and the library's of each stack, and whether this package's measuring asks."""
        self._functions: dict[str, Place] = {}
        """Own places by ``train.py:41``, of several functions in one line the first that asked for something."""
        self.first = 0
        """The number of steps before the first one that is counted."""
        self._counting = False
        self._compiled: tuple[int, dict[str, int]] = (0, {})
        self._steps: list[int] = []
        self._kinds: dict[bytes, int] = {}
        self._figures: list[StepCounts] = []
        self._causes: defaultdict[CountCause, dict[int, tuple[int, int]]] = defaultdict(dict)
        self._others: defaultdict[CountCause, dict[int, tuple[int, int]]] = defaultdict(dict)

    def note(self, line: str) -> None:
        """Note that what this thread asks for in a backward pass belongs to this own line, until another one is noted."""
        if self._counting or self._captures.value:  # a replay is counted with the lines of its capture
            number = self._noted.setdefault(line, len(self._noted) + 1) if line else 0
            self._library.gputrain_counters_note(number)

    def begin_step(self) -> None:
        """Take notice that a step starts on this thread."""
        self._compiled = _compiled()
        self._counting = True
        self._library.gputrain_counters_begin()

    def end_step(self, *, update: bool) -> None:
        """Take notice that the step has ended.

        Args:
            update: whether the optimizer was to update at its end.
        """
        self._library.gputrain_counters_end()
        self._counting = False
        judged, others = self._rows_of_step()
        figures = _figures(judged, update)
        # Names of kernels are left out: those of compiled code differ between equal runs.
        lines = sorted((repr(msgspec.structs.replace(cause, by="")), *numbers) for cause, numbers in judged.items())
        key = msgspec.json.encode([figures, lines])
        kind = self._kinds.setdefault(key, len(self._kinds))
        if kind == len(self._figures):
            self._figures.append(figures)
            for kept, counted in ((self._causes, judged), (self._others, others)):
                for cause, numbers in counted.items():
                    kept[cause][kind] = numbers
        self._steps.append(kind)

    def counts(self) -> Counts | None:
        """Return what all steps so far have asked for; None before the first one has ended."""
        if not self._steps:
            return None
        return Counts(
            steps=tuple(self._steps),
            kinds=tuple(self._figures),
            causes=tuple(_largest(self._by_kind(self._causes))),
            others=tuple(_largest(self._by_kind(self._others))),
            first=self.first,
            lines_unknown=self._lines_unknown,
        )

    def _by_kind(self, causes: dict[CountCause, dict[int, tuple[int, int]]]) -> Iterator[CountCause]:
        for cause, numbers in causes.items():
            counts, sizes = zip(*(numbers.get(kind, (0, 0)) for kind in range(len(self._figures))), strict=True)
            yield msgspec.structs.replace(cause, counts=counts, bytes=sizes if any(sizes) else ())

    def _rows_of_step(self) -> tuple[dict[CountCause, tuple[int, int]], dict[CountCause, tuple[int, int]]]:
        """Return numbers and bytes by what asked for them: those that are judged, and those of other threads."""
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
                own = self._place_of(noted[row.noted - 1])
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
        for cause in self._compiled_since(self._compiled):
            judged[cause] = judged[cause][0] + 1, 0
        return judged, others

    def _compiled_since(self, before: tuple[int, dict[str, int]]) -> Iterator[CountCause]:
        """Yield a cause for each function that torch.compile has compiled since, and for each graph break."""
        frames, breaks = _compiled()
        if (added := frames - before[0]) > 0:  # a program may clear torch's counters
            utils: Any = sys.modules["torch._dynamo.utils"]
            # Backward graphs are compiled, too, but have no function of their own.
            named = [one for one in getattr(utils, "get_compilation_metrics", list)() if getattr(one, "co_name", None)]
            for one in [*named[-added:], *[None] * (added - len(named))]:
                yield CountCause(what="compilations", counts=(), **self._compiled_function(one))
        for reason, number in breaks.items():
            first = next(iter(reason.splitlines()), "")[:_MOST_TEXT]
            for _ in range(number - before[1].get(reason, 0)):
                yield CountCause(what="graph_breaks", by=first, counts=())

    def _compiled_function(self, metrics: Any) -> dict[str, Any]:
        """Return what asks for a compilation, and the place of the function that is compiled."""
        file, function = (getattr(metrics, name, None) or "" for name in ("co_filename", "co_name"))
        by = f"torch.compile of {function}" if function else "torch.compile"
        line = getattr(metrics, "co_firstlineno", None) or 0
        if file and self._lines and (name := self._lines.name_of(file)):
            return {"by": by, "own": _own_place(name, file, function, line)}
        short = _name_in_library(file) if file else ""
        return {"by": by, "library": Place(short, function, "", line) if short else None}

    # --- Lines

    def _places_of(self, number: int) -> tuple[Place | None, Place | None, bool]:
        if number not in self._places:
            self._places[number] = self._find_places(number)
        return self._places[number]

    def _find_places(self, number: int) -> tuple[Place | None, Place | None, bool]:
        library: Place | None = None
        for line, file, function in stack(self._library, number):
            if file.startswith(_HIDDEN) or file.endswith(_BETWEEN):
                continue
            if file.startswith(f"{_PACKAGE}{os.sep}"):
                # What the worker itself calls is no part of the user's own code.
                return None, library, file.startswith(_MEASURING) or (self._lines is not None and library is None)
            name = self._lines.name_of(file) if self._lines else ""
            if name:
                place = _own_place(name, file, function, line)
                self._functions.setdefault(f"{name}:{line}", place)
                return place, library, False
            if library is None and (short := _name_in_library(file)):
                library = Place(short, function, "", line)
        return None, library, False

    def _place_of(self, line: str) -> Place:
        """Return the place of a noted line, of which the forward pass may have told the function."""
        found = self._functions.get(line)
        if found is None:
            file, _, number = line.rpartition(":")
            found = Place(file, "", "", int(number))
        return found


def _own_place(name: str, file: str, function: str, line: int) -> Place:
    """Return the place of a line of the user's own file, which goes by this name."""
    return Place(name, function, linecache.getline(file, line).strip()[:_MOST_TEXT], line)


def _figures(causes: dict[CountCause, tuple[int, int]], update: bool) -> StepCounts:
    """Add up what a step asks for."""
    sums: defaultdict[str, int] = defaultdict(int)
    slow: defaultdict[SlowClass, int] = defaultdict(int)
    for cause, (count, size) in causes.items():
        of_graph = cause.replayed and cause.what in PARTS_OF_WORK
        sums["replayed" if of_graph else cause.what] += count
        if cause.what == "launches":
            sums["blocks"] += size
        elif cause.what == "library_calls":
            sums["library_flops"] += size
            if cause.slow:
                slow[cause.slow] += size
        elif figure := _BYTES.get(cause.what.partition("_")[0]):
            sums[figure] += size
    return StepCounts(update=update, slow_flops=dict(sorted(slow.items())), **sums)


def _largest(causes: Iterable[CountCause]) -> Iterator[CountCause]:
    """Yield the causes, those of launches and library calls behind the others, and the most first; the rest in one row."""
    ordered = sorted(causes, key=lambda cause: (cause.what in ("launches", "library_calls", "d2d"), -max(cause.counts)))
    yield from ordered[:MOST_CAUSES]
    yield from added_up(
        CountCause(what=cause.what, replayed=cause.replayed, counts=cause.counts, bytes=cause.bytes)
        for cause in ordered[MOST_CAUSES:]
    )


def _name_in_library(file: str) -> str:
    """Return the path of a file of an installed package from its folder of packages; empty for one that was generated."""
    if file.startswith("<") or not is_installed(Path(file)):
        return ""
    folders = [folder for folder in sys.path if folder and file.startswith(folder.rstrip(os.sep) + os.sep)]
    return file[len(max(folders, key=len)) :].lstrip(os.sep) if folders else os.path.basename(file)


@functools.cache
def _short_name(mangled: str) -> str:
    """Return the name of a kernel without namespaces, parameters and arguments of templates."""
    library: Any = ctypes.CDLL("libstdc++.so.6")
    library.__cxa_demangle.restype = ctypes.c_void_p
    pointer = library.__cxa_demangle(mangled.encode(), None, None, None)
    name = ctypes.string_at(pointer).decode("utf-8", "replace") if pointer else mangled
    bare = re.sub(r"\(anonymous namespace\)::", "", name).removeprefix("void ")
    return re.split(r"[<(]", bare, maxsplit=1)[0].rpartition("::")[2][:_MOST_NAME]


def _compiled() -> tuple[int, dict[str, int]]:
    """Return how many functions this process has compiled so far, and its graph breaks by reason."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0, {}
    return int(utils.counters["frames"]["total"]), dict(utils.counters["graph_break"])
