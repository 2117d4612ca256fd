"""Describes the device that trains: an accelerator of torch.cuda (CUDA and ROCm share it) or the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol
from unittest import mock

import torch

from pytest_gputrain.records.step_memory import OfStep
from pytest_gputrain.worker.allocations import AllocationCounter
from pytest_gputrain.worker.batches_in_turn import batches_in_turn

_RESETS: Final = frozenset({"_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"})
"""Functions of ``torch._C`` that everything ends in which resets peaks by Python: ``torch.cuda.reset_peak_memory_stats``,
``reset_max_memory_allocated``, ``torch.accelerator.reset_peak_memory_stats``, however they were imported."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Peaks:
    """The highest memory since `Device.reset_peaks`, in bytes; None if the device has no such figure."""

    allocated: int | None
    reserved: int | None
    used: int | None
    """The memory in use on the whole device at this moment (context and other processes included)."""
    reset_unseen: bool = False
    """Whether the peaks may be too low: they were reset where `Device.keeping_peaks` could not see it."""


class Device(Protocol):
    """The device of a worker, with the functions that it needs."""

    type: Literal["cpu", "cuda", "rocm"]
    torch_device: torch.device
    threads: int
    computes: bool
    """Whether its kernels compute: those of an emulated GPU do not, so nothing is known of values and of time."""

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""

    def stamp(self) -> Any:
        """Record a moment on the device, as a CUDA event does: the end of all work that was queued so far."""

    def seconds_between(self, start: Any, end: Any) -> float:
        """Return the seconds between two stamps, once the device has finished all work."""

    def keeping_peaks(self) -> contextlib.AbstractContextManager[None]:
        """Provide a context that keeps peaks even if other code, such as a library or the step, resets them."""

    def reset_peaks(self) -> None:
        """Start new peaks from the memory that is in use now."""

    def peaks(self) -> Peaks:
        """Return the peaks since the last reset."""

    def allocated_bytes(self) -> int | None:
        """Return the bytes of live tensors; None if only a counted pass knows them. This is called after each step."""

    def of_step(self) -> OfStep | None:
        """Return the peak since the last call, and the bytes of live tensors; None if only a counted pass knows them."""

    def limit(self, memory_bytes: int) -> None:
        """Limit the memory of an emulated GPU from now on; 0 removes the limit. Other devices ignore it."""

    def counting(self, line: Callable[[], str]) -> contextlib.AbstractContextManager[AllocationCounter | None]:
        """Provide a context that counts tensor storages one by one on a device without an allocator of torch; else an empty
        context.

        Args:
            line: tells which line of the user's own files runs.
        """


def is_gpu(device: torch.device) -> bool:
    """Tell whether the device is a GPU."""
    return device.type != "cpu"


def stand_ins_loaded() -> bool:
    """Tell whether this process uses an emulated GPU, by a symbol that only the stand-ins export."""
    return hasattr(ctypes.CDLL(None), "gputrain_emulated_gpu")


def _check_found(*, asked: bool) -> None:
    """Check that the GPU is emulated if and only if the task asks for that."""
    found = stand_ins_loaded()
    if found and not asked:
        raise RuntimeError(
            "this worker found stand-ins of CUDA's libraries, and figures of an emulated GPU are not measurements; "
            "run pytest without gputrain emulate, or with --gpu-emulate"
        )
    if asked and not found:
        raise RuntimeError(
            "an emulated GPU is asked for, and this worker did not find the stand-ins of CUDA's libraries; a test that sets "
            "LD_PRELOAD has to keep what is in it"
        )


_reset_peaks_quietly: Final[Callable[[int], None]] = getattr(torch._C, "_cuda_resetPeakMemoryStats", lambda device: None)
"""torch's own function, whatever `Accelerator.keeping_peaks` puts in its place."""


class Accelerator:
    """The GPU of this rank. The parent process has hidden all other GPUs from it."""

    def __init__(self, rank: int = 0, *, emulated: bool = False) -> None:
        """
        Args:
            emulated: whether an emulated GPU is asked for.

        Raises:
            RuntimeError: there is no GPU, or it is emulated and was asked to be real, or the other way round.
        """
        _check_found(asked=emulated)
        if not torch.cuda.is_available():
            raise RuntimeError(
                f"the parent saw a GPU, but this torch ({torch.__version__}) cannot use one; install a build of torch "
                "for the machine's CUDA or ROCm driver"
            )
        self.type: Literal["cpu", "cuda", "rocm"] = "rocm" if torch.version.hip else "cuda"
        self.torch_device = torch.device("cuda", rank)
        self.threads = torch.get_num_threads()
        self.computes = not stand_ins_loaded()
        self._highest: tuple[int, ...] = (0, 0)
        """Allocated and reserved bytes since our own reset, whoever resets torch's."""
        self._last: tuple[int, ...] = (0, 0)
        """The last peak that torch reported, since any reset."""
        self._interval = 0
        """The highest allocated bytes since the last call of `interval_peak`."""
        self._step = 0
        """The highest allocated bytes since the last call of `of_step`."""
        self._reset_unseen = False
        torch.cuda.set_device(self.torch_device)
        torch.cuda.init()

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds_between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        milliseconds: float = start.elapsed_time(end)
        return milliseconds / 1000

    @contextlib.contextmanager
    def keeping_peaks(self) -> Iterator[None]:
        def keeping(reset: Callable[..., Any]) -> Callable[..., Any]:
            def keep_and_reset(*args: Any) -> Any:
                self._keep_peaks()
                result = reset(*args)
                self._last = (0, 0)
                return result

            return keep_and_reset

        with contextlib.ExitStack() as stack:
            for name in _RESETS & set(dir(torch._C)):
                stack.enter_context(mock.patch.object(torch._C, name, keeping(getattr(torch._C, name))))
            yield

    def reset_peaks(self) -> None:
        self._keep_peaks()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._highest = self._last = (0, 0)
        self._reset_unseen = False

    def peaks(self) -> Peaks:
        self._keep_peaks()
        free, total = torch.cuda.mem_get_info(self.torch_device)
        allocated, reserved = self._highest
        return Peaks(allocated=allocated, reserved=reserved, used=total - free, reset_unseen=self._reset_unseen)

    def interval_peak(self) -> int:
        """Return the highest allocated bytes since the last call, even if other code has reset torch's peaks."""
        self._restart_peaks()
        peak, self._interval = self._interval, 0
        return peak

    def of_step(self) -> OfStep | None:
        self._restart_peaks()
        peak, self._step = self._step, 0
        return OfStep(peak, torch.cuda.memory_allocated(self.torch_device))

    def _restart_peaks(self) -> None:
        """Save the peaks of torch's caching allocator, and start new ones from the memory that is in use now."""
        self._keep_peaks()
        _reset_peaks_quietly(self.torch_device.index)
        self._last = (0, 0)

    def allocated_bytes(self) -> int | None:
        self._keep_peaks()
        return torch.cuda.memory_allocated(self.torch_device)

    def limit(self, memory_bytes: int) -> None:
        if not self.computes:
            ctypes.CDLL(None).gputrain_limit(ctypes.c_size_t(memory_bytes or -1))

    def _keep_peaks(self) -> None:
        """Save the peaks of torch's caching allocator before other code resets them."""
        stats = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        now = tuple(stats[name]["all"]["peak"] if name in stats else 0 for name in ("allocated_bytes", "reserved_bytes"))
        self._reset_unseen |= any(peak < before for peak, before in zip(now, self._last, strict=True))
        self._last = now
        self._interval, self._step = max(self._interval, now[0]), max(self._step, now[0])
        self._highest = tuple(map(max, self._highest, now))

    def counting(self, line: Callable[[], str]) -> contextlib.AbstractContextManager[AllocationCounter | None]:
        return contextlib.nullcontext()


class Cpu:
    """The CPU, on one thread. Two threads doubled the noise of a step where this was measured (CV 3-6 % against 8 %)."""

    type: Literal["cpu", "cuda", "rocm"] = "cpu"
    torch_device = torch.device("cpu")
    threads = 1
    computes = True

    def __init__(self) -> None:
        torch.set_num_threads(self.threads)

    def synchronize(self) -> None:
        """Do nothing: CPU operators have finished when they return."""

    def stamp(self) -> float:
        return time.perf_counter()

    def seconds_between(self, start: float, end: float) -> float:
        return end - start

    def keeping_peaks(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def reset_peaks(self) -> None:
        """Do nothing, because a CPU has no peaks outside of `counting`."""

    def peaks(self) -> Peaks:
        return Peaks(allocated=None, reserved=None, used=None)

    def allocated_bytes(self) -> int | None:
        return None

    def of_step(self) -> OfStep | None:
        return None

    def limit(self, memory_bytes: int) -> None:
        """Do nothing, because the memory of a host is not limited."""

    @contextlib.contextmanager
    def counting(self, line: Callable[[], str]) -> Iterator[AllocationCounter | None]:
        # Python frees reference cycles whenever its garbage collector runs. The collector is off here, so that the count is
        # the same in every run.
        gc.disable()
        try:
            with batches_in_turn(), AllocationCounter(line) as counter:
                # The first operator under a mode imports torch's compiler. Exceptions of this import would keep the frames
                # of a step, with all its tensors.
                torch.empty(0)
                gc.collect()
                yield counter
        finally:
            gc.enable()


def peak_host_bytes() -> int:
    """Return the highest resident set of this process in bytes.

    From ``VmHWM`` where there is a /proc: ``ru_maxrss`` starts at the parent's value there.
    """
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    kilobytes: Any = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(kilobytes) * 1024
