"""Counts what the operators of a step compute and move, by operator and by line of the user's own."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final
from unittest import mock

import msgspec
import torch

from pytest_gputrain.records import OperatorWork, TracedCall
from pytest_gputrain.worker.allocations import name_of, strided_parts
from pytest_gputrain.worker.checks import local
from pytest_gputrain.worker.flops import FlopCount
from pytest_gputrain.worker.traced_calls import describe

_MOST_LINES: Final = 20
"""Lines of an operator that are kept, those that move most."""
_LAUNCHERS: Final = {
    "triton.runtime.jit": "JITFunction",
    "torch._inductor.runtime.triton_heuristics": "CachingAutotuner",
}
"""The classes whose ``run`` launches kernels of Triton: a program's own, and those of torch.compile."""


class WorkCount(FlopCount):
    """Counts the FLOPs of a step on a GPU, and the bytes that its operators read and write, by operator and own line.

    An operator reads each element of its tensor arguments once, and writes each element of its results, or of the arguments
    that it changes. Views move nothing.

    Args:
        line: tells which line of the user's own files runs.
    """

    def __init__(self, line: Callable[[], str]) -> None:
        super().__init__()
        self._line = line
        self._calls: defaultdict[tuple[int, TracedCall], int] = defaultdict(int)
        """How often each thread made a call."""
        self._within = threading.local()
        self._rows: defaultdict[tuple[int, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        """Calls, FLOPs and bytes by thread, operator and line."""

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        self._within.operator = True
        try:
            return super().run(func, args, kwargs)
        finally:
            self._within.operator = False

    def count(self, func: Any, args: Any, kwargs: Any, result: Any, flops: int) -> None:
        read, written = _bytes_moved(func, args, kwargs, result)
        call = describe(func, args, kwargs, flops, read, written, optimizing=self.share().optimizers > 0)
        self._calls[threading.get_ident(), call] += 1
        if (moved := read + written) or flops:
            row = self._rows[threading.get_ident(), name_of(func), self._line()]
            row[0] += 1
            row[1] += flops
            row[2] += moved

    def __enter__(self) -> WorkCount:
        super().__enter__()
        # Kernels that Triton launches do not come through torch's dispatcher.
        self._of_triton = contextlib.ExitStack()
        for module, launcher in _LAUNCHERS.items():
            if owner := getattr(sys.modules.get(module), launcher, None):
                self._of_triton.enter_context(mock.patch.object(owner, "run", self._launching(owner.run)))
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._of_triton.close()
        super().__exit__(*exc_info)

    def _launching(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(self._within, "operator", False):
                # torch's operator has launched this kernel, and the operator itself is counted.
                return run(kernel, *args, **kwargs)
            moved = _bytes_of(args) + _bytes_of(kwargs.values())
            call = TracedCall(operator=f"triton.{getattr(kernel.fn, '__name__', 'kernel')}", read=moved)
            self._calls[threading.get_ident(), call] += 1
            return run(kernel, *args, **kwargs)

        return launch

    def forget_calls(self) -> None:
        """Forget the calls so far."""
        self._calls.clear()

    def add_exchange(self, collective: str, size: int) -> None:
        """Count an exchange of this many bytes with other GPUs that comes from no operator."""
        self._calls[threading.get_ident(), TracedCall(operator=f"c10d.{collective}", read=size)] += 1

    def calls(self) -> list[TracedCall]:
        """Return the calls of all threads, in the same order in every run."""
        counts: defaultdict[TracedCall, int] = defaultdict(int)
        for (_, call), count in self._calls.items():
            counts[call] += count
        every = (msgspec.structs.replace(call, count=count) for call, count in counts.items())
        return sorted(every, key=msgspec.structs.astuple)

    @property
    def bytes(self) -> int:
        """The bytes that all operators read and wrote."""
        return sum(moved for _, _, moved in self._rows.values())

    def by_operator(self) -> dict[str, OperatorWork]:
        """Return the work of each operator. Recomputation by activation checkpointing is a part of it."""
        lines: defaultdict[str, defaultdict[str, list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0, 0]))
        for (_, operator, line), row in self._rows.items():
            total = lines[operator][line]
            total[:] = map(sum, zip(total, row, strict=True))
        found = {}
        for operator in sorted(lines):
            calls, flops, moved = (sum(row[place] for row in lines[operator].values()) for place in range(3))
            at = sorted(((line, row[1], row[2]) for line, row in lines[operator].items() if line), key=lambda row: -row[2])
            found[operator] = OperatorWork(calls=calls, flops=flops, bytes=moved, lines=tuple(at[:_MOST_LINES]))
        return found


@functools.cache
def moves_memory(func: Any) -> bool:
    """Tell whether an operator reads and writes memory. A view does not, and an operator that only allocates does not."""
    name = name_of(func)
    return not (func.is_view or name.startswith(("aten.empty", "aten.new_empty")) or name == "aten.detach")


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and the names of the arguments that an operator writes to."""
    return tuple((place, argument.name) for place, argument in enumerate(func._schema.arguments) if argument.is_write)


def _bytes_moved(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[int, int]:
    """Return the bytes that a call reads and writes."""
    if not moves_memory(func):
        return 0, 0
    written: Any = (result,)
    if result is None:
        written = [args[place] if place < len(args) else kwargs.get(name) for place, name in written_arguments(func)]
    return _bytes_of(args) + _bytes_of(kwargs.values()), _bytes_of(written)


def _bytes_of(values: Iterable[Any]) -> int:
    """Return the bytes of the elements of tensors on the GPU. For an expanded tensor these are the bytes of its storage."""
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            tensor = local(value)
            if not tensor.is_cuda or hasattr(tensor, "__tensor_flatten__"):
                continue
            for part in strided_parts(tensor):
                total += min(part.numel() * part.itemsize, part.untyped_storage().nbytes())
        elif isinstance(value, (list, tuple)):
            total += _bytes_of(value)
    return total
