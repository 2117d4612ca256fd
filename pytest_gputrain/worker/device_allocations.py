"""Follows what torch's allocator gives out of an emulated GPU: the peak of each phase of training, and what lived there."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from unittest import mock

import torch

from pytest_gputrain.records import LiveTensor, TrainingPhase
from pytest_gputrain.worker.allocations import strided_parts
from pytest_gputrain.worker.device import Accelerator
from pytest_gputrain.worker.emulated_values.autograd_lines import AutogradLines
from pytest_gputrain.worker.emulated_values.contents import extent
from pytest_gputrain.worker.memory_recorder import MOST_EVENTS
from pytest_gputrain.worker.phases import Phases
from pytest_gputrain.worker.storages import name_of_dtype
from pytest_gputrain.worker.trace import BLOCK, Trace, peaks

_ROWS: Final = 16
"""Rows of tensors at each peak, so that one of a tenth of the peak is always among them."""
_FIRST_STEPS: Final = 3
"""Steps in which optimizers and caches get what they keep."""
_COMPILED: Final = "compiled code"
_UNKNOWN: Final = "code that calls no operator"


class _Output(NamedTuple):
    """A tensor that an operator returned."""

    bytes: int
    """The size of its storage, by which its allocation is found."""
    shape: tuple[int, ...]
    dtype: str


@dataclass(slots=True)
class _Call:
    """A call of an operator, whose number torch's memory history keeps with each allocation that it makes."""

    operator: str
    phase: TrainingPhase
    line: str = ""
    outputs: Sequence[_Output] = ()


class DeviceAllocations:
    """Follows the allocations of one emulated GPU.

    Peaks of phases are those of torch's allocator, whose own peak is reset where a phase ends. What lived at a peak is found
    in torch's memory history. It is read and cleared after each step, so that a run of any length can be followed.

    It enters no dispatch mode, because autograd takes other ways under one. Operators tell it of themselves instead: it is
    the ``Observer`` of ``emulated_values``.

    Args:
        device: the GPU.
        lines: finds the user's own lines.
        note_line: called with the line of each operator of a backward pass before it runs, and with none afterwards.
        names_tensors: whether it is asked for what lived at the peaks.
    """

    def __init__(
        self, device: Accelerator, lines: AutogradLines, note_line: Callable[[str], None], *, names_tensors: bool = True
    ) -> None:
        self._device, self._lines, self._note_line = device, lines, note_line
        self._trace = Trace(BLOCK)
        self.phases = Phases(self._entered)
        self._phase: TrainingPhase | None = "build"
        """The phase that runs; None in a step of which no peak is taken."""
        self._peaks: dict[TrainingPhase, int] = {}
        self._following = False
        # torch before 2.10 cannot attach text to an allocation.
        self._note: Callable[[str], None] | None = getattr(torch._C, "_cuda_setMemoryMetadata", None)
        self._numbers = itertools.count(1)
        self._thread = threading.local()
        self._calls: dict[str, _Call] = {}
        self._phases_by_number: list[tuple[int, TrainingPhase | None]] = []
        self._live: dict[int, int] = {}
        """The number in the trace of each live block, by its address."""
        self._firsts: list[int] = []
        """The number in the trace of the first allocation of each step."""
        self._largest: dict[TrainingPhase, tuple[LiveTensor, ...]] | None = None
        self.why_unknown = "" if names_tensors else "nobody asked for them"
        """The reason why the tensors at the peaks are not known."""

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Provide a context for all from the build of a case to the end of its last timed step."""
        if self._note is None:
            self.why_unknown = f"the allocator of torch {torch.__version__} keeps no notes with its history"
        record = torch.cuda.memory._record_memory_history

        def record_for_the_program(*args: Any, **kwargs: Any) -> Any:
            self.why_unknown = "the program itself records torch's memory history"
            return record(*args, **kwargs)

        guards: Any = torch._C._dynamo.guards
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.phases)
            stack.enter_context(mock.patch.object(torch.cuda.memory, "_record_memory_history", record_for_the_program))
            stack.enter_context(
                mock.patch.object(guards, "_empty_strided_cuda", self._observed(guards._empty_strided_cuda, _COMPILED))
            )
            stack.enter_context(
                mock.patch.object(
                    torch.UntypedStorage, "resize_", self._observed(torch.UntypedStorage.resize_, "aten.resize_")
                )
            )
            self._record = record
            self._clear()
            self._device.interval_peak()
            self._following = True
            try:
                yield
            finally:
                self._following = False
                if not self.why_unknown:
                    record(enabled=None)

    def _observed(self, function: Any, name: str) -> Any:
        """Return a function that allocates without an operator, wrapped so that its allocations are recorded."""

        def observed(*args: Any, **kwargs: Any) -> Any:
            output = None
            self.begin(name)
            try:
                output = function(*args, **kwargs)
            finally:
                self.end(output)
            return output

        return observed

    # --- What operators tell

    def begin(self, operator: str) -> None:
        """Note that an operator begins on this thread."""
        if not self._following:
            return
        if getattr(self._thread, "call", None) is not None:  # An operator that is written in Python has called this one.
            self._thread.inner += 1
            return
        self.phases.follow()
        number = str(next(self._numbers))
        self._thread.inner = 0
        self._thread.call = self._calls[number] = _Call(operator, self.phases.current)
        if self._note is not None:
            self._note(number)  # From here on torch attaches this call's number to each allocation of this thread.
        if torch._C._current_autograd_node() is not None:
            self._thread.call.line = self._lines.current()
            self._note_line(self._thread.call.line)

    def end(self, output: Any) -> None:
        """Note that the operator has returned."""
        call = getattr(self._thread, "call", None)
        if call is None:
            return
        if self._thread.inner:
            self._thread.inner -= 1
            return
        self._thread.call = None
        if self._note is not None:
            self._note("")
        if torch._C._current_autograd_node() is None:
            call.line = self._lines.current()
        else:
            self._note_line("")
        if not self.why_unknown:
            call.outputs = list(_outputs(output))

    # --- Steps

    def begin_step(self) -> None:
        """Note that a step starts."""
        if not self.phases.in_steps:
            self._read()
            self._trace.begin_training()
        self._firsts.append(len(self._trace.allocations))
        self.phases.begin_step()

    def begin_beside_steps(self, phase: TrainingPhase) -> None:
        """Note that an evaluation or a checkpoint starts, which is no step."""
        self._largest = None
        self.phases.begin_beside_steps(phase)

    def end_step(self) -> None:
        """Note that a step, an evaluation or a checkpoint has ended."""
        self._keep_peak()
        self._read()

    def _entered(self, phase: TrainingPhase) -> None:
        if (self._phase, phase) == ("backward", "optimizer"):
            # The phase between backward and optimizer gets a peak even if it allocates nothing. A later version that
            # allocates there is compared with this peak.
            self._entered("between")
        self._keep_peak()
        self._phase = phase if self.phases.in_steps else None
        self._phases_by_number.append((next(self._numbers), self._phase))

    def _keep_peak(self) -> None:
        peak = self._device.interval_peak()
        if self._phase is not None:
            self._peaks[self._phase] = max(self._peaks.get(self._phase, 0), peak)

    @property
    def phase_peak_bytes(self) -> dict[TrainingPhase, int]:
        """The highest memory that torch's allocator had handed out in each phase, up to the end of the last step."""
        return dict(self._peaks)

    def largest(self) -> dict[TrainingPhase, tuple[LiveTensor, ...]]:
        """Return the tensors at the peak of each phase; nothing if they are unknown."""
        if self._largest is None:
            self._largest = {} if self.why_unknown else self._trace.largest_at_peaks(peaks(self._trace), _ROWS)
        return self._largest

    def peak_bytes_by_origin(self) -> dict[TrainingPhase, int]:
        """Return the bytes at the peak of the steps, by the phase that allocated them; nothing if they are unknown."""
        if self.why_unknown:
            return {}
        of_trace = peaks(self._trace)
        return self._trace.by_origin(of_trace.events[of_trace.phase])

    def kept(self) -> tuple[Counter[LiveTensor], int]:
        """Return the tensors that the steps made and that still live, each with its number, and the number of these steps.

        Of the first steps an optimizer keeps its states. Of the last one much may be still in use.
        """
        firsts = self._firsts[_FIRST_STEPS:] or self._firsts
        made = (number for number in self._live.values() if firsts[0] <= number < firsts[-1])
        return Counter(self._trace.allocations[number] for number in made), len(firsts) - 1

    # --- torch's memory history

    def _clear(self) -> None:
        if not self.why_unknown:
            self._record(enabled="all", context=None, stacks="python", max_entries=MOST_EVENTS, clear_history=True)

    def _read(self) -> None:
        """Add the allocations and frees since the last call to the trace."""
        if not self.why_unknown:
            traces: Sequence[list[dict[str, Any]]] = torch._C._cuda_memorySnapshot(None)["device_traces"]
            index = self._device.torch_device.index
            events = traces[index] if index < len(traces) else []
            if len(events) >= MOST_EVENTS:
                self.why_unknown = (
                    f"a step made about {MOST_EVENTS // 3:,} allocations or more, of which torch keeps only the last"
                )
            self._clear()
            self._add(events)
        self._calls.clear()
        self._phases_by_number.clear()

    def _add(self, events: Iterable[dict[str, Any]]) -> None:
        entered = iter([*self._phases_by_number, (sys.maxsize, self._phase)])
        at, phase = next(entered)
        current: TrainingPhase = "build"
        for event in events:
            action, address = event["action"], event.get("addr", 0)  # The event of running out of memory has no address.
            if action == "alloc":
                text = event.get("user_metadata", "")
                call = self._calls.get(text)
                while call is not None and at < int(text):
                    self._trace.enter(phase)
                    at, phase = next(entered)
                current = call.phase if call is not None else current
                self._live[address] = self._allocate(event["size"], call, current)
            elif action == "free_requested" and (number := self._live.pop(address, -1)) >= 0:
                self._trace.free(number)
        while at < sys.maxsize:
            self._trace.enter(phase)
            at, phase = next(entered)

    def _allocate(self, size: int, call: _Call | None, phase: TrainingPhase) -> int:
        if call is None:
            return self._trace.allocate(size, _UNKNOWN, phase, (size,), "bytes")
        other = _Output(size, (size,), "bytes")  # A workspace is no output, so its type is unknown.
        _, shape, dtype = next((output for output in call.outputs if output.bytes == size), other)
        return self._trace.allocate(size, call.operator, call.phase, shape, dtype, call.line)


def _outputs(value: Any) -> Iterator[_Output]:
    if isinstance(value, torch.Tensor):
        if value.is_cuda:
            for part in strided_parts(value):
                # The storage is not read here. Its Python object would count as a user of the gradient, and autograd would
                # no longer add to the gradient in place.
                yield _Output(extent(part), tuple(part.shape), name_of_dtype(part.dtype))
    elif isinstance(value, torch.UntypedStorage):
        yield _Output(value.nbytes(), (value.nbytes(),), "bytes")
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _outputs(one)
