"""Finds memory that the counted steps of own code hold beside the tensors that are counted."""

from __future__ import annotations

import contextlib
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, Final
from unittest import mock

import torch
from torch.utils import _python_dispatch

from pytest_gputrain.utils.units import MiB, format_bytes
from pytest_gputrain.worker.allocations import GIVEN, LIFT
from pytest_gputrain.worker.own_lines import OwnLines
from pytest_gputrain.worker.trace import Trace

_LEAST: Final = 4 * MiB
_LEAST_SHARE: Final = 0.1
"""Python's memory beside tensors is mentioned from this many bytes on, and from this share of the counted peak on."""


class MemoryBeside:
    """Traces what the last counted steps allocate in Python's memory, such as NumPy arrays. It also records lines that hide
    operators from the counter.

    Args:
        after: the number of counted steps after which it traces. It triples their time, and what a step makes for the first
            time is there by then.
    """

    def __init__(self, after: int) -> None:
        self._steps_to_come = after
        self._since: int | None = None
        """The number of events of the trace when it began."""
        self._bytes = 0
        self._hiding: dict[str, str] = {}
        """The functions that hide operators, by the line that calls them."""

    @contextlib.contextmanager
    def noting(self, lines: OwnLines) -> Iterator[None]:
        """Provide a context for the build and the steps that records which lines hide operators from the counter."""

        def noted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                frame = sys._getframe(1)
                if file := lines.name_of(frame.f_code.co_filename):
                    self._hiding.setdefault(f"{file}:{frame.f_lineno}", name)
                return function(*args, **kwargs)

            return call

        with contextlib.ExitStack() as stack:
            for module, name in ((_python_dispatch, "_disable_current_modes"), (torch._C, "_DisableTorchDispatch")):
                stack.enter_context(mock.patch.object(module, name, noted(getattr(module, name), name)))
            stack.callback(self._stop)
            yield

    def begin_step(self, trace: Trace) -> None:
        """Note that a counted step is to begin."""
        self._steps_to_come -= 1
        # tracemalloc is not used here if the program itself uses it.
        if self._steps_to_come == -1 and not tracemalloc.is_tracing():
            self._since = len(trace.events)
            tracemalloc.start()

    def end(self, trace: Trace) -> None:
        """Note that the last counted step has ended."""
        if self._since is not None and tracemalloc.is_tracing():
            # tracemalloc also sees the worker's own lists and the buffers of counted tensors, which are subtracted.
            buffers, _ = trace.bytes_of({GIVEN, LIFT}, self._since)
            known = sum(map(sys.getsizeof, (trace.events, trace.allocations))) + buffers
            self._bytes = tracemalloc.get_traced_memory()[1] - known
            self._stop()

    def _stop(self) -> None:
        if self._since is not None:
            tracemalloc.stop()
            self._since = None

    def uncounted(self, peak_bytes: int) -> Iterator[str]:
        """Yield sentences on memory that was not counted.

        Args:
            peak_bytes: the counted peak.
        """
        if self._bytes > max(_LEAST, _LEAST_SHARE * peak_bytes):
            yield (
                f"a step holds up to {format_bytes(self._bytes)} in Python's own memory, such as NumPy arrays and "
                "bytearrays, which is not counted"
            )
        for line, name in self._hiding.items():
            yield f"tensors that {line} makes below {name} are counted only where other operators take them"
