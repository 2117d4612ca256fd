"""Counts the batches of torch's DataLoader and the optimizer updates in a step of own code, and times how long it waits for
batches.

A data set may be read in other processes, at other times than the step that takes the batch. So the function that makes a
batch of samples counts these, and sends their number with the batch.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Final
from unittest import mock

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter

from pytest_gputrain.records import CountCause, CountName, Place
from pytest_gputrain.worker.allocations import strided_parts

Places = Callable[[FrameType], tuple[Place | None, Place | None, bool]]
"""Finds the own line of a frame and the library's, and whether this package's measuring asks."""


class LoadsAndUpdates:
    """Counts the batches that the training takes from data loaders, and the updates of its optimizers, on the thread that
    makes this object.

    Attributes:
        waits: seconds that each step between `begin_step` and `end_step` waited for its batches.
        loads: whether such a step has taken a batch.
    """

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.loads = False
        self._thread = threading.get_ident()
        self._places: Places | None = None
        self._causes: defaultdict[CountCause, list[int]] = defaultdict(lambda: [0, 0])
        self._seen: list[weakref.ref[Any]] = []
        """The optimizers that have stepped in the step, and the iterators of loaders that have given a batch."""

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Provide a context that records the batches of data loaders."""
        initialize: Any = _BaseDataLoaderIter.__init__

        def follow(iterator: Any, *args: Any, **kwargs: Any) -> None:
            initialize(iterator, *args, **kwargs)
            iterator._collate_fn = _Collate(iterator._collate_fn, iterator._auto_collation)
            for kind in type(iterator).__mro__:
                _unpack_batches_of(kind)

        with mock.patch.object(_BaseDataLoaderIter, "__init__", follow):
            _FOLLOWING.append(self)
            try:
                yield
            finally:
                _FOLLOWING.remove(self)

    def begin(self, places: Places) -> None:
        """Count from now on the batches that this thread takes from data loaders, and the updates of its optimizers."""
        self._places = places
        self._causes.clear()
        self._seen.clear()

    def end(self) -> dict[CountCause, tuple[int, int]]:
        """Stop counting. Return the causes, each with its count and its bytes."""
        self._places = None
        self._seen.clear()
        return {cause: (number, size) for cause, (number, size) in self._causes.items()}

    def begin_step(self) -> None:
        """Note that a step begins whose waits are timed."""
        self.waits.append(0.0)

    def updated(self, optimizer: Optimizer) -> None:
        """Record that an optimizer steps."""
        if self._places is not None and not self._first(optimizer):
            self._add("repeated_updates", type(optimizer).__name__, 1)

    def loaded(self, iterator: Any, batch: _Batch, seconds: float) -> None:
        """Record a batch of a data loader, and the seconds that it took."""
        if threading.get_ident() != self._thread:
            return
        if self.waits:
            self.waits[-1] += seconds
            self.loads = True
        if self._places is None:
            return
        name = type(iterator._dataset).__name__
        self._add("loads", name, batch.samples, _bytes_of(batch.data))
        if self._first(iterator) and iterator._num_workers:
            self._add("loader_workers", name, iterator._num_workers)

    def _first(self, user: object) -> bool:
        """Record this loader or optimizer, and tell whether this is its first call in the step."""
        first = all(user is not seen() for seen in self._seen)
        if first:
            self._seen.append(weakref.ref(user))
        return first

    def _add(self, what: CountName, by: str, number: int, size: int = 0) -> None:
        assert self._places is not None
        own, library, is_ours = self._places(sys._getframe())
        if is_ours:
            return
        row = self._causes[CountCause(what=what, by=by, own=own, library=None if own else library, counts=())]
        row[0] += number
        row[1] += size


_FOLLOWING: Final[list[LoadsAndUpdates]] = []


class _Batch:
    """A batch with its number of samples, on its way to the loop that takes it."""

    def __init__(self, data: Any, samples: int) -> None:
        self.data, self.samples = data, samples

    def pin_memory(self) -> _Batch:
        """Pin the data. A thread of the data loader calls this."""
        return _Batch(pin_memory(self.data), self.samples)


class _Collate:
    """Makes a batch by the data loader's own function, and counts its samples.

    Args:
        of_many: whether it is given a list of samples, rather than a sample or a batch that the data set has made.
    """

    def __init__(self, make: Callable[[Any], Any], of_many: bool) -> None:
        self._make, self._of_many = make, of_many

    def __call__(self, samples: Any) -> _Batch:
        # A data set with `__getitems__` may return a finished batch, as a dict or anything else.
        is_list = self._of_many and hasattr(samples, "__len__") and not isinstance(samples, dict)
        number = len(samples) if is_list else 1
        return _Batch(self._make(samples), number)


def _unpack_batches_of(kind: Any) -> None:
    """Make the iterators of a class return the plain batch, and report each batch to the recorder. A subclass of torch's may
    change what ``_next_data`` returns.

    This stays for as long as the process lives: loaders may outlive the training, and with them the processes that make such
    batches.
    """
    real = vars(kind).get("_next_data")
    if real is None or hasattr(real, "unpacks_batches"):
        return

    def take(iterator: Any) -> Any:
        start = time.perf_counter()
        batch = real(iterator)
        if not isinstance(batch, _Batch):
            return batch
        if _FOLLOWING:
            _FOLLOWING[-1].loaded(iterator, batch, time.perf_counter() - start)
        return batch.data

    take.unpacks_batches = True  # type: ignore[attr-defined]
    kind._next_data = take


def _bytes_of(data: Any, depth: int = 2, within: tuple[Any, ...] = ()) -> int:
    """Return the bytes of the tensors in a batch.

    Args:
        depth: the number of objects below each other whose attributes are searched. A batch of graphs is an object that has
            its tensors in another one.
        within: what it is in. A collection or an object may hold itself.
    """
    if isinstance(data, torch.Tensor):
        return sum(part.numel() * part.itemsize for part in strided_parts(data))
    if any(data is each for each in within):
        return 0
    within = (*within, data)
    if isinstance(data, Mapping):
        data = data.values()
    elif not isinstance(data, list | tuple):
        if not depth or not hasattr(data, "__dict__"):
            return 0
        data, depth = vars(data).values(), depth - 1
    return sum(_bytes_of(value, depth, within) for value in data)
