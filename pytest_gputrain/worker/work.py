"""Counts what the operators of a step compute and move, by operator and by line of the user's own."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from pytest_gputrain.records import OperatorWork, Peaks
from pytest_gputrain.worker.allocations import name_of, strided_parts
from pytest_gputrain.worker.checks import local
from pytest_gputrain.worker.flops import FlopCount, is_convolution, type_of

_MOST_LINES: Final = 20
"""Lines of an operator that are kept, those that move most."""
_RATES: Final = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""The names of rates in the catalog."""


class WorkCount(FlopCount):
    """Counts the FLOPs of a step on a GPU, and the bytes that its operators read and write, by operator and own line.

    An operator reads each element of its tensor arguments once, and writes each element of its results, or of the arguments
    that it changes. Views move nothing.

    Args:
        line: tells which line of the user's own files runs.
        rates: of the GPU, for the least time of the step; None if that is not asked for.
    """

    def __init__(self, line: Callable[[], str], rates: Peaks | None) -> None:
        super().__init__()
        self._line = line
        self._of_flop = {name: 1 / rate for name, rate in rates.flops.items()} if rates else {}
        self._of_byte = 1 / rates.bandwidth if rates else 0.0
        self._seconds: defaultdict[int, list[float]] = defaultdict(list)
        self._rows: defaultdict[tuple[int, str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
        """Calls, FLOPs and bytes by thread, operator and line."""

    def count(self, func: Any, args: Any, kwargs: Any, result: Any, flops: int) -> None:
        moved = _bytes_moved(func, args, kwargs, result)
        if moved or flops:
            row = self._rows[threading.get_ident(), name_of(func), self._line()]
            row[0] += 1
            row[1] += flops
            row[2] += moved
            least = max(moved * self._of_byte, flops * self._seconds_of_flop(func, args) if flops else 0.0)
            self._seconds[threading.get_ident()].append(least)

    def _seconds_of_flop(self, func: Any, args: Any) -> float:
        dtype = str(type_of(args)).removeprefix("torch.")
        if dtype == "float32" and is_convolution(name_of(func)) and "tf32" in self._of_flop:
            return self._of_flop["tf32"]
        return self._of_flop.get(_RATES.get(dtype, ""), 0.0)

    @property
    def least_seconds(self) -> float | None:
        """The sum, over the operators, of the larger of arithmetic and memory traffic at the peak rates of the GPU; None
        where these are not known."""
        # Exactly, so that it is the same in whatever order threads end.
        return math.fsum(itertools.chain.from_iterable(self._seconds.values())) or None

    @property
    def bytes(self) -> int:
        """The bytes that all operators read and wrote."""
        return sum(moved for _, _, moved in self._rows.values())

    def by_operator(self) -> dict[str, OperatorWork]:
        """Return the work of each operator; recomputation by activation checkpointing is a part of it."""
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
    """Tell whether an operator reads and writes memory: a view does not, and neither does one that only allocates."""
    name = name_of(func)
    return not (func.is_view or name.startswith(("aten.empty", "aten.new_empty")) or name == "aten.detach")


@functools.cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Return places and names of the arguments that an operator writes to."""
    return tuple((place, argument.name) for place, argument in enumerate(func._schema.arguments) if argument.is_write)


def _bytes_moved(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    if not moves_memory(func):
        return 0
    written: Any = (result,)
    if result is None:
        written = [args[place] if place < len(args) else kwargs.get(name) for place, name in written_arguments(func)]
    return _bytes_of(args) + _bytes_of(kwargs.values()) + _bytes_of(written)


def _bytes_of(values: Iterable[Any]) -> int:
    """Return the bytes of the elements of tensors on the GPU; of an expanded one no more than its storage."""
    total = 0
    for value in values:
        if isinstance(value, torch.Tensor):
            tensor = local(value)
            if not tensor.is_cuda or hasattr(tensor, "__tensor_flatten__"):
                continue
            for part in (tensor,) if tensor.layout == torch.strided else strided_parts(tensor):
                total += min(part.numel() * part.itemsize, part.untyped_storage().nbytes())
        elif isinstance(value, (list, tuple)):
            total += _bytes_of(value)
    return total
