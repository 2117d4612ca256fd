"""Loads batches by processes of torch's DataLoader, as a training on a data set does."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import DataLoader, IterableDataset

from pytest_gputrain.utils.linux import PARENT, die_with_parent

_AHEAD: Final = 2
"""Batches that each process loads ahead: torch's default."""


class Loader:
    """Loads the same batch for every step. Other processes draw it anew, and it is pinned and copied to the device.

    What decoding and tokenising a data set costs is not in it: a batch takes as long as it takes to draw its random numbers.

    Args:
        draw: makes a batch on the host.
        workers: processes.
        moved: inputs that are copied to the device; the others stay on the host.

    Attributes:
        waits: seconds that each step waited for its batch.
    """

    def __init__(self, draw: Callable[[], dict[str, Tensor]], workers: int, device: torch.device, moved: set[str]) -> None:
        self._device = device
        self._moved = moved
        self._ahead = _AHEAD * workers
        self.waits: list[float] = []
        loader: DataLoader[Any] = DataLoader(
            _Endless(draw),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=_AHEAD,
            pin_memory=device.type != "cpu",
            worker_init_fn=_DieWith(os.getpid()),
            # A process that loads has no use for the model, and a fork does not copy it.
            multiprocessing_context="fork",
        )
        # A batch may arrive before its step. So modes that count must not see how it arrives.
        self._uncounted = _disable_current_modes if loader.num_workers else contextlib.nullcontext
        self._batches: Iterator[dict[str, Tensor]] | None = iter(loader)

    def next(self) -> dict[str, Tensor]:
        """Return the next batch, and begin to copy the one after it."""
        start = time.perf_counter()
        batch = self._take()
        self.waits.append(time.perf_counter() - start)
        return {
            # Memory of other processes is not counted. So the batch is copied into this process, even on a CPU.
            name: value.to(self._device, non_blocking=True, copy=True) if name in self._moved else value
            for name, value in batch.items()
        }

    def drain(self) -> None:
        """Drop all batches that were loaded while nothing trained, because steps would not wait for them."""
        for _ in range(self._ahead):
            self._take()

    def close(self) -> None:
        """End the loading processes."""
        self._batches = None

    def _take(self) -> dict[str, Tensor]:
        assert self._batches is not None, "closed"
        with self._uncounted():
            return next(self._batches)


class _Endless(IterableDataset[dict[str, Tensor]]):
    def __init__(self, draw: Callable[[], dict[str, Tensor]]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while True:
            yield self._draw()


class _DieWith:
    """Ends a process of the DataLoader together with the training process. torch's own check comes only later."""

    def __init__(self, parent: int) -> None:
        self._parent = parent

    def __call__(self, number: int) -> None:
        os.environ[PARENT] = str(self._parent)
        die_with_parent()
