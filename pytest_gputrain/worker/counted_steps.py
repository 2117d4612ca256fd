"""Collects the counts of a training's steps, by kind of step and by line of code, whatever counts them."""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal

import msgspec

from pytest_gputrain.records import CountCause, Counts, Place, SlowClass, StepCounts
from pytest_gputrain.records.counts import MOST_CAUSES, PARTS_OF_WORK, added_up
from pytest_gputrain.worker.loads_and_updates import LoadsAndUpdates
from pytest_gputrain.worker.own_lines import MOST_TEXT, OwnLines, name_in_library, own_place
from pytest_gputrain.worker.python_calls import PythonCalls, with_python_calls

_PACKAGE: Final = Path(__file__).parents[1]
"""The folder as frames name it, which may be below a symbolic link."""
_HIDDEN: Final = tuple(
    str(_PACKAGE / "worker" / name)
    for name in (
        "emulated_values",
        "device_allocations.py",
        "untouched_host.py",
        "updates.py",
        "loads_and_updates.py",
        "threads.py",
        "flops.py",
        "work.py",
        "step_counts.py",
        "operator_counts.py",
        "python_frames.py",
        "memory_recorder.py",
        "script_recorder.py",
    )
)
"""Code that stands between an operator and what counts it, or between a program and the trainer that it calls."""
_MEASURING: Final = tuple(
    str(_PACKAGE / "worker" / name) for name in ("device.py", "loop.py", "straggler_clock.py", "checks.py")
)
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
_COMPREHENSION: Final = re.compile(r"\.<locals>\.<(?:list|set|dict)comp>$")
"""Up to Python 3.11 a comprehension has a frame of its own. Without its name a line has one function in all versions."""
_BYTES: Final = {
    "h2d": "h2d_bytes",
    "d2h": "d2h_bytes",
    "d2d": "d2d_bytes",
    "collectives": "collective_bytes",
    "loads": "loaded_bytes",
}
"""The figure that adds up the bytes of what is counted, by the beginning of its name."""

_Kind = Literal["own", "library", "ours", "measuring", "between"]
"""Whose a file is: the user's, a package's, this package's, of this package what measures, or of no interest."""
_WORK: Final = (*PARTS_OF_WORK, "operators")
Causes = Mapping[CountCause, tuple[int, int]]
"""The causes of counts, each with its count and its bytes."""


class CountedSteps:
    """The counts of all counted steps, with the causes of each count.

    Args:
        lines: finds the user's own lines; None for a case without own code.
    """

    def __init__(self, lines: OwnLines | None) -> None:
        self.lines = lines
        self.lines_unknown = ""
        """The reason why causes have no lines."""
        self.python: tuple[PythonCalls, int] | None = None
        """The calls of Python functions, and the kind of the steps that they are of; None if they are not known."""
        self.asked: LoadsAndUpdates | None = None
        """The counter of batches and optimizer updates of own code; None for a case without own code."""
        self.on_cpu = self.profiled = False
        self.first = 0
        """The number of steps before the first one that is counted."""
        self.compiled: tuple[int, dict[str, int]] = (0, {})
        """The number of functions that torch.compile had compiled before the counted step, and its graph breaks by
        reason."""
        self._files: dict[str, tuple[_Kind, str]] = {}
        """Whose each file is, and its name."""
        self._functions: dict[str, Place] = {}
        """Own places by ``train.py:41``, of several functions in one line the first that asked for something."""
        self._steps: list[int] = []
        self._kinds: dict[bytes, int] = {}
        self._figures: list[StepCounts] = []
        self._causes: defaultdict[CountCause, dict[int, tuple[int, int]]] = defaultdict(dict)
        self._others: defaultdict[CountCause, dict[int, tuple[int, int]]] = defaultdict(dict)

    def begin_asked(self) -> None:
        """Count from now on the batches that this thread takes from data loaders, and the updates of its optimizers."""
        if self.asked:
            self.asked.begin(lambda frame: self.places(frames_of(frame)))

    def end_asked(self) -> Causes:
        """Stop counting, and return what was counted."""
        return self.asked.end() if self.asked else {}

    def add(self, judged: Causes, others: Causes, *, update: bool) -> None:
        """Add a step.

        Args:
            judged: the causes of counts in the training.
            others: the causes of counts in other threads.
            update: whether the optimizer was to update at the end of the step.
        """
        figures = _figures(judged, update)
        # Names of kernels are left out, because names of compiled kernels differ between equal runs.
        lines = sorted((repr(msgspec.structs.replace(cause, by="")), *numbers) for cause, numbers in judged.items())
        key = msgspec.json.encode([figures, lines])
        kind = self._kinds.setdefault(key, len(self._kinds))
        if kind == len(self._figures):
            self._figures.append(figures)
            for kept, counted in ((self._causes, judged), (self._others, others)):
                for cause, numbers in counted.items():
                    kept[cause][kind] = numbers
        self._steps.append(kind)

    @property
    def steps(self) -> int:
        """The number of steps that have ended."""
        return len(self._steps)

    def kind_of_step(self, index: int) -> int | None:
        """Return the kind of a counted step; None if the step was not counted."""
        return self._steps[index] if self._steps else None

    def kind_of(self, judged: Causes, *, update: bool) -> int | None:
        """Return the kind of the counted steps whose counts equal those of this later step; None if there are none. A kind
        is an index of `Counts.kinds`.

        Args:
            judged: what was counted in the later step.
            update: whether the optimizer was to update at its end.
        """
        asked = _steady(_figures(judged, update))
        return next((kind for kind in reversed(self._steps) if _steady(self._figures[kind]) == asked), None)

    def counts(self) -> Counts | None:
        """Return the counts of all steps so far; None before the first step has ended."""
        if not self._steps:
            return None
        counts = Counts(
            steps=tuple(self._steps),
            kinds=tuple(self._figures),
            causes=tuple(_largest(self._by_kind(self._causes))),
            others=tuple(_largest(self._by_kind(self._others))),
            first=self.first,
            lines_unknown=self.lines_unknown,
            on_cpu=self.on_cpu,
            profiled=self.profiled,
        )
        return counts if self.python is None else with_python_calls(counts, *self.python)

    def _by_kind(self, causes: dict[CountCause, dict[int, tuple[int, int]]]) -> Iterator[CountCause]:
        for cause, numbers in causes.items():
            counts, sizes = zip(*(numbers.get(kind, (0, 0)) for kind in range(len(self._figures))), strict=True)
            yield msgspec.structs.replace(cause, counts=counts, bytes=sizes if any(sizes) else ())

    def compiled_since(self) -> Iterator[CountCause]:
        """Yield a cause for each function that torch.compile has compiled in the step, and for each graph break."""
        before = self.compiled
        frames, breaks = compiled()
        if (added := frames - before[0]) > 0:  # A program that has cleared torch's counters makes this negative.
            utils: Any = sys.modules["torch._dynamo.utils"]
            # A compiled backward graph has metrics, but it has no function of its own.
            named = [one for one in getattr(utils, "get_compilation_metrics", list)() if getattr(one, "co_name", None)]
            for one in [*named[-added:], *[None] * (added - len(named))]:
                yield CountCause(what="compilations", counts=(), **self._compiled_function(one))
        for reason, number in breaks.items():
            first = next(iter(reason.splitlines()), "")[:MOST_TEXT]
            for _ in range(number - before[1].get(reason, 0)):
                yield CountCause(what="graph_breaks", by=first, counts=())

    def _compiled_function(self, metrics: Any) -> dict[str, Any]:
        """Return the line that caused a compilation, and the place of the compiled function."""
        file, function = (getattr(metrics, name, None) or "" for name in ("co_filename", "co_name"))
        by = f"torch.compile of {function}" if function else "torch.compile"
        line = getattr(metrics, "co_firstlineno", None) or 0
        if file and self.lines and (name := self.lines.name_of(file)):
            return {"by": by, "own": self._own_place(name, file, function, line)}
        short = name_in_library(file) if file else ""
        return {"by": by, "library": Place(short, function, "", line) if short else None}

    # --- Lines

    def places(self, frames: Iterable[tuple[int, str, str]]) -> tuple[Place | None, Place | None, bool]:
        """Return the own line and the library's line of these frames, and whether this package itself made the call.

        Args:
            frames: line, file and function of each, the innermost first.
        """
        library: Place | None = None
        for line, file, qualified in frames:
            function = _COMPREHENSION.sub("", qualified)
            kind, name = self._files.get(file) or self._look_at(file)
            if kind == "own":
                return self._own_place(name, file, function, line), library, False
            if kind == "ours":
                # The worker itself has called this operator, so it has no line of the user's code.
                return None, library, self.lines is not None and library is None
            if kind == "measuring":
                return None, library, True
            if library is None and kind == "library":
                library = Place(name, function, "", line)
        return None, library, False

    def _look_at(self, file: str) -> tuple[_Kind, str]:
        """Return whether a file of Python code is the user's, a library's or this package's, and the name by which records
        call it."""
        kind: _Kind
        name = ""
        if file.startswith(_HIDDEN) or file.endswith(_BETWEEN):
            kind = "between"
        elif file.startswith(f"{_PACKAGE}{os.sep}"):
            kind = "measuring" if file.startswith(_MEASURING) else "ours"
        elif name := self.lines.name_of(file) if self.lines else "":
            kind = "own"
        else:
            name = name_in_library(file)
            kind = "library" if name else "between"
        self._files[file] = kind, name
        return kind, name

    def _own_place(self, name: str, file: str, function: str, line: int) -> Place:
        """Return the place of a line in a file of the user's, under this name of the file."""
        place = own_place(name, file, function, line)
        self._functions.setdefault(f"{name}:{line}", place)
        return place

    def place_of(self, line: str) -> Place:
        """Return the place of a noted line, with its function if the forward pass has noted it."""
        found = self._functions.get(line)
        if found is None:
            file, _, number = line.rpartition(":")
            found = Place(file, "", "", int(number))
        return found


def frames_of(frame: FrameType | None, *, within_backward: bool = False) -> Iterator[tuple[int, str, str]]:
    """Yield line, file and function of a frame and of those that called it.

    Args:
        within_backward: whether to stop where a backward pass was asked for.
    """
    while frame is not None:
        code = frame.f_code
        if within_backward and code.co_name == "_engine_run_backward":
            return
        yield frame.f_lineno, code.co_filename, code.co_qualname
        frame = frame.f_back


def counts_of(causes: Causes, lines_unknown: str) -> Counts:
    """Return counts of one step."""
    rows = (
        msgspec.structs.replace(cause, counts=(count,), bytes=(size,) if size else ())
        for cause, (count, size) in causes.items()
    )
    figures = _figures(causes, update=True)
    return Counts(steps=(0,), kinds=(figures,), causes=tuple(_largest(rows)), lines_unknown=lines_unknown)


def _figures(causes: Causes, update: bool) -> StepCounts:
    """Return the counts of a step, each as the sum over its causes."""
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


def _steady(figures: StepCounts) -> StepCounts:
    """Return the figures without those that depend on the caches of allocators."""
    return msgspec.structs.replace(figures, mallocs=0, frees=0)


def _largest(causes: Iterable[CountCause]) -> Iterator[CountCause]:
    """Yield the largest causes, and the others as one row. Causes of work come last."""
    ordered = sorted(causes, key=lambda cause: (cause.what in _WORK, -max(cause.counts)))
    yield from ordered[:MOST_CAUSES]
    yield from added_up(
        CountCause(what=cause.what, replayed=cause.replayed, counts=cause.counts, bytes=cause.bytes)
        for cause in ordered[MOST_CAUSES:]
    )


def compiled() -> tuple[int, dict[str, int]]:
    """Return how many functions this process has compiled so far, and its graph breaks by reason."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return 0, {}
    return int(utils.counters["frames"]["total"]), dict(utils.counters["graph_break"])
