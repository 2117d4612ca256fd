"""Follows live tensor storages, each until it dies, and writes a trace of them."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from pytest_gputrain.records import TrainingPhase
from pytest_gputrain.worker.trace import Trace


class Storages:
    """Tracks the storages of one memory, from the first look until they are freed. Views and in-place operators cost no
    time.

    Args:
        trace: gets what is allocated and freed.
        line: tells which line of the user's own files runs.
        lock: is held while these change, as several threads may make or free tensors.
    """

    def __init__(
        self,
        trace: Trace,
        line: Callable[[], str],
        lock: contextlib.AbstractContextManager[Any],
    ) -> None:
        self.trace = trace
        self._line = line
        self._lock = lock
        self._sizes: dict[int, int] = {}
        """Bytes by address."""
        self._numbers: dict[int, int] = {}
        """Allocation by address."""
        self._references: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._left = False
        self.live_bytes = 0
        """Sum over the live storages."""
        self._highest = 0
        """The highest of it since `interval_peak` was asked."""
        self.traced = True
        """Whether the trace gets what is made from now on. It always gets what of that is freed."""

    def has(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._sizes

    def knows(self, storage: torch.UntypedStorage) -> bool:
        """Tell whether the storage has been seen with the size that it has."""
        return self._sizes.get(storage._cdata) == storage.nbytes()

    def interval_peak(self) -> int:
        """Return the highest bytes of live storages since the last call."""
        with self._lock:
            highest, self._highest = self._highest, self.live_bytes
        return highest

    def see(
        self,
        storage: torch.UntypedStorage,
        size: int,
        operator: str,
        phase: TrainingPhase,
        shape: tuple[int, ...],
        dtype: torch.dtype | None,
    ) -> None:
        """Record a storage that is new or has changed its size. While a storage is resized both sizes exist, because one is
        copied."""
        key = storage._cdata
        with self._lock:
            if self._left:  # An operator of another thread had begun before the counter was left.
                return
            size_before = self._sizes.get(key)
            if size_before is None:
                self._references[key] = weakref.ref(storage, lambda _, key=key: self._forget(key))  # type: ignore[misc]
            if size_before != size:
                before = self._numbers.pop(key, None)
                self._sizes[key] = size
                self.live_bytes += size
                self._highest = max(self._highest, self.live_bytes)
                self.live_bytes -= size_before or 0
                if size and self.traced:
                    name = "bytes" if dtype is None else name_of_dtype(dtype)
                    self._numbers[key] = self.trace.allocate(size, operator, phase, shape, name, self._line())
                if before is not None:
                    self.trace.free(before)

    def leave(self) -> None:
        """Stop following all storages."""
        with self._lock:
            self._left = True
            self._references.clear()

    def _forget(self, key: int) -> None:
        with self._lock:
            self._references.pop(key, None)
            self.live_bytes -= self._sizes.pop(key, 0)
            number = self._numbers.pop(key, None)
            if number is not None:
                self.trace.free(number)


@functools.cache
def name_of_dtype(dtype: torch.dtype) -> str:
    """Return the name of a type, such as ``float32``."""
    return str(dtype).removeprefix("torch.")
