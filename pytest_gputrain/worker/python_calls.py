"""Counts the calls of Python functions in one step, by the line of the user's own files that they come from.

A GPU waits for a host that runs more Python between the same launches, which no other count shows. The step is one of its
own, because this slows it down. Garbage is not collected in it, because that calls functions at times of its own.

Calls on the thread that trains count, and those on autograd's threads, such as hooks. What is left out depends on the clock
or on other processes: threads that the program starts, progress bars, and functions that wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import dis
import gc
import inspect
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, Literal

import msgspec
import torch

from pytest_gputrain.records import CountCause, Counts, Place
from pytest_gputrain.worker.own_lines import OwnLines, name_in_library, own_place

_PACKAGE: Final = Path(__file__).parents[1]
_TRAINS: Final = tuple(
    str(_PACKAGE / "worker" / name)
    for name in ("loader.py", "loops.py", "methods.py", "optimizers.py", "training.py", "frameworks", "parallel", "zoo")
)
"""Our code that trains, and does not measure: what it calls is counted."""
_RESUMES: Final = "GeneratorLoop._take"
"""The function among them that looks at what it resumes."""
_BETWEEN: Final = tuple(
    str(_PACKAGE / "worker" / name) for name in ("batches_in_turn.py", "loads_and_updates.py", "threads.py")
)
"""Our code that is called between a line of the user's and a library."""
_COUNTS: Final = "LoadsAndUpdates."
"""The class in one of these files that counts, and is left out."""
_WAITING: Final = tuple(
    str(Path(threading.__file__).with_name(name)) for name in ("threading.py", "queue.py", "concurrent", "multiprocessing")
)
"""Modules that call more functions the longer something takes."""
_LOADER: Final = os.path.join("torch", "utils", "data", "dataloader.py")
_LOADS_IN_PROCESSES: Final = "_MultiProcessingDataLoaderIter."
"""The class whose methods call others as often as batches arrive out of turn."""
_BARS: Final = f"{os.sep}tqdm{os.sep}"
"""The part of the names of files whose functions draw by the clock, but for the one that iterates over something else."""
_ITERATES: Final = "__iter__"
_GENERATORS: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_AUTOGRAD: Final = "pt_autograd"
"""The beginning of the names of autograd's threads."""

_Kind = Literal["own", "library", "between", "trains", "left out"]
_Origin = tuple[int, int]
"""The identity of a code object and an instruction in it, from which a call comes."""

_WHOLE: Final = -1
"""The number in place of an instruction if the function as a whole is meant."""

# These origins have 0 in place of the identity of a code object.
_LINE: Final = (0, 1)
"""The origin of what an own function calls, in place of the instruction that it runs."""
_NOWHERE: Final = (0, 2)
"""The origin of calls that no own line has led to."""
_UNCOUNTED: Final = (0, 3)
"""The origin of calls that are not counted."""


class CannotCount(Exception):
    """Calls of Python functions cannot be counted; the message says why."""


class PythonCalls:
    """Counts the calls of Python functions in one step that the calling thread trains.

    Args:
        lines: finds the user's own lines; None for a case without own code.
        device: trains. Its autograd has threads of its own if it is a GPU.
    """

    def __init__(self, lines: OwnLines | None, device: torch.device) -> None:
        self._lines = lines
        self._device = device
        self._calls: Counter[_Origin] = Counter()
        self._codes: dict[int, CodeType] = {}
        """Code objects by their identity, which is theirs for as long as they are kept here."""
        self._kinds: dict[int, _Kind] = {}
        self._starts: dict[int, int] = {}
        """The instruction that a generator starts at, behind what makes it."""
        self._origins: dict[int, _Origin] = {}
        """The origin of the calls that each running frame makes, by the identity of the frame."""
        self._threads = {threading.get_ident(): True}
        """Whether the calls of a thread count."""

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Provide a context for the step whose calls are counted.

        Raises:
            CannotCount: the program uses Python's means of counting itself.
        """
        for frame in sys._current_frames().values():
            self._note_running(frame)
        gc.collect()
        collects = gc.isenabled()
        gc.disable()
        try:
            with self._monitored() if sys.version_info >= (3, 12) else self._profiled():
                yield
        finally:
            if collects:
                gc.enable()

    @property
    def total(self) -> int:
        """The number of calls."""
        return self._calls.total()

    def causes(self) -> Iterator[tuple[CountCause, int]]:
        """Yield the origins of calls with their numbers. An origin is the own line, or for a built-in model the library's
        file."""
        numbers: Counter[CountCause] = Counter()
        for (identity, instruction), number in self._calls.items():
            numbers[self._cause(self._codes[identity], instruction)] += number
        yield from sorted(numbers.items(), key=lambda cause: -cause[1])

    # --- Events

    @contextlib.contextmanager
    def _monitored(self) -> Iterator[None]:
        monitoring: Any = sys.monitoring  # type: ignore[attr-defined]  # from Python 3.12 on
        tool = next((number for number in (3, 4, 2) if monitoring.get_tool(number) is None), None)
        if tool is None:
            raise CannotCount("other tools have taken all of sys.monitoring")
        current, threads = sys._getframe, self._threads

        def start(code: CodeType, instruction: int) -> None:
            if threads.get(threading.get_ident()) or self._counts_thread():
                self._enter(current(1), code, starts=True)

        def resume(code: CodeType, instruction: int, *exception: BaseException) -> None:
            if threads.get(threading.get_ident()) or self._counts_thread():
                self._enter(current(1), code, starts=False)

        events = monitoring.events
        monitoring.use_tool_id(tool, "pytest-gputrain")
        try:
            monitoring.register_callback(tool, events.PY_START, start)
            monitoring.register_callback(tool, events.PY_RESUME, resume)
            monitoring.register_callback(tool, events.PY_THROW, resume)
            monitoring.set_events(tool, events.PY_START | events.PY_RESUME | events.PY_THROW)
            yield
        finally:
            monitoring.set_events(tool, 0)
            for event in (events.PY_START, events.PY_RESUME, events.PY_THROW):
                monitoring.register_callback(tool, event, None)
            monitoring.free_tool_id(tool)

    @contextlib.contextmanager
    def _profiled(self) -> Iterator[None]:
        if sys.getprofile() is not None:
            raise CannotCount("the program profiles itself by sys.setprofile")

        def called(frame: FrameType, event: str, argument: Any) -> None:
            if event == "call":
                code = frame.f_code
                # Python sends this event also when a generator continues.
                resumes = code.co_flags & _GENERATORS and frame.f_lasti != self._start_of(code)
                self._enter(frame, code, starts=not resumes)

        self._in_autograd_thread(lambda: sys.setprofile(called))
        sys.setprofile(called)
        try:
            yield
        finally:
            others = sys.getprofile() is not called
            sys.setprofile(None)
            self._in_autograd_thread(lambda: sys.setprofile(None))
        if others:
            raise CannotCount("the step profiles itself by sys.setprofile")

    def _in_autograd_thread(self, action: Callable[[], None]) -> None:
        """Run ``action`` in the thread of the backward pass on a GPU, because a profiler sees only the thread that sets
        it."""
        if self._device.type == "cpu":
            return
        with torch.enable_grad():
            value = torch.ones((), device=self._device, requires_grad=True)
            result = value * 1
            result.register_hook(lambda gradient: action())
            result.backward()

    def _counts_thread(self) -> bool:
        """Tell whether the calls of this thread count. Threads that the program has started do not."""
        thread = threading.get_ident()
        counts = self._threads.get(thread)
        if counts is None:
            try:
                name = Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text()
            except OSError:
                name = ""
            counts = self._threads[thread] = name.startswith(_AUTOGRAD)
        return counts

    def _note_running(self, frame: FrameType | None) -> None:
        """Record for each frame of a stack the origin of the calls that it makes."""
        frames = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        for running in reversed(frames):
            self._enter(running, running.f_code, starts=False)

    def _enter(self, frame: FrameType, code: CodeType, *, starts: bool) -> None:
        """Record that a function starts or continues."""
        identity = id(code)
        kind = self._kinds.get(identity) or self._kind_of(code)
        caller = frame.f_back
        origin = self._origins.get(id(caller), _NOWHERE)
        if origin is _LINE:
            assert caller is not None
            origin = (id(caller.f_code), caller.f_lasti)
        if kind in {"library", "between"}:
            self._origins[id(frame)] = origin
        elif kind == "own":
            self._origins[id(frame)] = _LINE
        else:
            self._origins[id(frame)] = _NOWHERE if kind == "trains" else _UNCOUNTED
        if not starts or (kind != "own" and (kind != "library" or origin is _UNCOUNTED)):
            return
        if origin is _NOWHERE or origin is _UNCOUNTED:
            if kind == "library" and caller is not None and self._kinds.get(id(caller.f_code)) == "library":
                identity = id(caller.f_code)
            origin = (identity, _WHOLE)
        self._calls[origin] += 1

    # --- Places

    def _kind_of(self, code: CodeType) -> _Kind:
        """Return the kind of a function, and keep it with the function's code, whose `id` is the key."""
        self._codes[id(code)] = code
        kind = self._kinds[id(code)] = self._found_kind(code.co_filename, code.co_qualname)
        return kind

    def _found_kind(self, file: str, function: str) -> _Kind:
        if file.startswith(_BETWEEN) and not function.startswith(_COUNTS):
            return "between"
        if file.startswith(f"{_PACKAGE}{os.sep}"):
            return "trains" if file.startswith(_TRAINS) and function != _RESUMES else "left out"
        if self._lines and self._lines.name_of(file):
            return "own"
        if _BARS in file:
            return "between" if function.endswith(_ITERATES) else "left out"
        waits = file.startswith(_WAITING) or (file.endswith(_LOADER) and function.startswith(_LOADS_IN_PROCESSES))
        return "left out" if waits else "library"

    def _start_of(self, code: CodeType) -> int:
        start = self._starts.get(id(code))
        if start is None:
            self._codes[id(code)] = code
            start = next(one.offset for one in dis.get_instructions(code) if one.opname == "RESUME")
            self._starts[id(code)] = start
        return start

    def _cause(self, code: CodeType, instruction: int) -> CountCause:
        file, function = code.co_filename, code.co_qualname
        if self._lines and (name := self._lines.name_of(file)):
            line = _line_of(code, instruction) if instruction >= 0 else code.co_firstlineno
            return CountCause(what="python_calls", own=own_place(name, file, function, line), counts=())
        short = name_in_library(file)
        return CountCause(what="python_calls", library=Place(short, "") if short else None, counts=())


def _line_of(code: CodeType, instruction: int) -> int:
    """Return the line of an instruction, which is given by its offset in bytes."""
    return int(ctypes.pythonapi.PyCode_Addr2Line(ctypes.py_object(code), ctypes.c_int(instruction)))


def with_python_calls(counts: Counts, calls: PythonCalls, kind: int) -> Counts:
    """Return the counts with the calls of Python functions, which are those of the steps of this kind."""
    kinds = list(counts.kinds)
    kinds[kind] = msgspec.structs.replace(kinds[kind], python_calls=calls.total)

    def by_kind(number: int) -> tuple[int, ...]:
        return tuple(number if one == kind else 0 for one in range(len(kinds)))

    causes = tuple(msgspec.structs.replace(cause, counts=by_kind(number)) for cause, number in calls.causes())
    python = ".".join(map(str, sys.version_info[:2]))
    return msgspec.structs.replace(counts, kinds=tuple(kinds), causes=(*counts.causes, *causes), python=python)
