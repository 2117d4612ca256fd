"""Follows CUDA graphs: what operators write while their stream is captured, each replay writes, and the capture does not."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .busy_streams import memory_segments
from .contents import Contents
from .evaluation import flat

_Function: Final[Any] = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)

_DROPPED: Final = 256
"""The most numbers of steps that are taken back at a time."""


class _Step(NamedTuple):
    """A computation that follows an operator at each replay."""

    run: Callable[..., Any] | None
    """Takes the operator's arguments, keywords and output. None if what it writes is never known."""
    arguments: Any
    keywords: Any
    output: Any
    written: list[Tensor]


class Graphs:
    """Adds to the CUDA graphs of this process functions that compute at each replay what operators make of known inputs.

    Args:
        contents: the values that are known.

    Attributes:
        captures: how many captures are under way in any thread, to be looked at before anything else: none of them costs
            an operator little.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._numbers = itertools.count(1)
        self._steps: dict[int, _Step] = {}
        self._stand_ins: Any = ctypes.CDLL(None)
        self._stand_ins.gputrain_note_step.argtypes = [ctypes.c_void_p, _Function, ctypes.c_uint64]
        self._stand_ins.gputrain_dropped_steps.restype = ctypes.c_size_t
        self._most_in_pools = 0
        self.captures = ctypes.c_int.in_dll(self._stand_ins, "gputrain_captures")
        self._function = _Function(self._run)

    def follow_pools(self) -> None:
        """Note the memory of private pools after each capture."""
        graph: Any = torch.cuda.CUDAGraph
        end = graph.capture_end

        @functools.wraps(end)
        def end_and_note(this: Any) -> None:
            try:
                end(this)
            finally:  # torch keeps the pool also if the capture fails.
                in_pools = sum(one["total_size"] for one in memory_segments() if tuple(one["segment_pool_id"]) != (0, 0))
                self._most_in_pools = max(self._most_in_pools, in_pools)

        graph.capture_end = end_and_note

    def report(self) -> dict[str, int]:
        """Return the numbers of CUDA graphs of this process; none if nothing was captured.

        They are the graphs that were captured, the launches, the most graphs and the most of their kernels at a time, and
        the most bytes that private pools held after a capture.
        """
        numbers = (ctypes.c_uint64 * 4)()
        self._stand_ins.gputrain_graphs(numbers)
        captured, launched, most, kernels = numbers
        if not captured:
            return {}
        return {
            "captured": captured,
            "launched": launched,
            "most": most,
            "most_kernels": kernels,
            "most_in_pools": self._most_in_pools,
        }

    def capture(self) -> bool:
        """Tell whether a CUDA graph is being captured from the current stream."""
        return self.captures.value > 0 and torch.cuda.is_current_stream_capturing()

    def defer(
        self,
        run: Callable[..., Any] | None,
        arguments: Any,
        keywords: Any,
        output: Any,
        written: Iterable[Any],
        *,
        reads_host: bool = False,
    ) -> bool:
        """Have a computation follow an operator at each replay, if the current stream is captured; tell whether it is.

        Args:
            run: takes the operator's arguments, keywords and output. None if what it writes is never known.
            written: the tensors that it writes. They become unknown if nobody knows whether it runs.
            reads_host: whether each replay reads tensors of the host anew, and no copy of their values.
        """
        if not self.capture():
            return False
        targets = [one for one in (_without_owning(tensor, True) for tensor in flat(list(written))) if one is not None]
        step = _Step(None, None, None, None, targets)
        if run is not None:
            arguments = [*arguments]
            if _are_strided([*arguments, *keywords.values(), output]):
                arguments, keywords, output = (_without_owning(one, reads_host) for one in (arguments, keywords, output))
                step = _Step(run, arguments, keywords, output, targets)
        self._take_back()
        number = next(self._numbers)
        self._steps[number] = step
        self._stand_ins.gputrain_note_step(_current_stream(), self._function, number)
        return True

    def _run(self, number: int, forget: int) -> int:
        """Run the computation that follows an operator.

        Args:
            forget: whether nobody knows if the operator has run.

        Returns:
            A status of CUDA's.
        """
        step = self._steps[number]
        # The replaced operators run below autograd and autocast, so a replay does the same, and ignores the modes of its
        # thread.
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch._C._DisableAutocast(), torch.no_grad():
            if forget or step.run is None:
                for tensor in step.written:
                    self._contents.forget(tensor)
                return 0
            status = step.run(step.arguments, step.keywords, step.output, replays=True)
        return status if type(status) is int else 0

    def _take_back(self) -> None:
        """Drop the steps of graphs that are gone."""
        numbers = (ctypes.c_uint64 * _DROPPED)()
        while count := self._stand_ins.gputrain_dropped_steps(numbers, ctypes.c_size_t(_DROPPED)):
            for number in numbers[:count]:
                del self._steps[number]


def _current_stream() -> int:
    stream: int = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    return stream


def _are_strided(values: Iterable[Any]) -> bool:
    return all(tensor.layout is torch.strided for tensor in flat(list(values)))


def _without_owning(value: Any, reads_host: bool) -> Any:
    """Return the value with GPU tensors as aliases that do not own their memory, and host tensors copied unless the graph
    reads them."""
    if isinstance(value, Tensor):
        if not value.is_cuda:
            return value if reads_host else value.clone()
        return _alias(value) if value.layout is torch.strided else None
    if type(value) in (list, tuple):
        return type(value)(_without_owning(one, reads_host) for one in value)
    return {name: _without_owning(one, reads_host) for name, one in value.items()} if type(value) is dict else value


def _alias(tensor: Tensor) -> Tensor:
    construct: Any = torch._C._construct_storage_from_data_pointer
    base = tensor.data_ptr() - int(tensor.storage_offset()) * tensor.itemsize
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    if not base:
        return alias.reshape(tensor.size())
    storage = construct(base, tensor.device, tensor.untyped_storage().nbytes())
    alias.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
    alias = alias.conj() if tensor.is_conj() else alias
    return torch._neg_view(alias) if tensor.is_neg() else alias
