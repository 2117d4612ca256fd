"""Keeps the known contents of an emulated GPU's memory, by address."""

from __future__ import annotations

import bisect
import ctypes
import functools
import mmap
import os
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from .pieces import Pieces
from .sparse import elements

MOST_BYTES: Final = 1 << 20
"""The most bytes of a computed tensor of integers or booleans."""

MOST_FLOAT_BYTES: Final = 64 << 10
"""The most bytes of a computed tensor of floating point numbers."""

MOST_DEALT_BYTES: Final = 256 << 20
"""The most bytes of a tensor that follows from the choice of experts: the loops over experts read masks of tokens by
experts."""

_MOST_DEALT_AT_ONCE: Final = 512 << 20
"""The most bytes of all such tensors together, which take memory of the host."""

MATCHES, CHOICES, COUNTS = range(3)
"""What `Dealt` values are: whether choices are those that others say, as of labels; choices; and how often something was
chosen. Of several the greatest counts."""

_NUMBER_BYTES: Final = 8
_MADV_DONTNEED: Final = 4

_CPU: Final = torch.device("cpu")

_FIRST_ADDRESS, _ADDRESSES = 64, 1 << 47
"""An address that is aligned for all types, and how many addresses a process of x86-64 can use."""


class Dealt(NamedTuple):
    """Marks values that follow from made-up choices, which are distributed evenly.

    Attributes:
        kind: `MATCHES`, `CHOICES` or `COUNTS`.
        by: the operators that chose, each with its line.
    """

    kind: int
    by: frozenset[tuple[str, str]]


def joined(parts: Iterable[Dealt | None]) -> Dealt | None:
    """Combine the marks of several inputs; None if none of them follows from made-up choices."""
    dealt = [part for part in parts if part is not None]
    return Dealt(max(part.kind for part in dealt), frozenset().union(*(part.by for part in dealt))) if dealt else None


class Known:
    """A range of a block of device memory whose contents are known.

    Attributes:
        low: its first address.
        high: the address behind it.
        value: what all elements of its type are, in place of contents in memory; None if these are in memory.
        dealt: how it follows from choices that were dealt; None if it does not.
        number: of the block, until torch frees it.
        noted: how many addresses that other libraries may have written to were compared with this range.
    """

    __slots__ = ("dealt", "high", "low", "noted", "number", "value")

    def __init__(
        self,
        low: int,
        high: int,
        value: Tensor | None = None,
        *,
        dealt: Dealt | None = None,
        number: int = 0,
        noted: int = 0,
    ) -> None:
        self.number = number
        self.noted = noted
        self.low = low
        self.high = high
        self.value = value
        self.dealt = dealt


class Contents:
    """The contents that are known, by the first address of the block that torch's allocator gave.

    A block that torch frees becomes unknown, so one that is used again starts so.

    Attributes:
        pieces: where the values come from that are not known.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, Known] = {}
        self._dealt: dict[int, Known] = {}
        """Known contents that follow from made-up choices, the oldest first. Some may no longer be known."""
        self._dealt_bytes = 0
        stand_ins: Any = ctypes.CDLL(None)
        stand_ins.gputrain_watch.argtypes = [ctypes.c_void_p]
        stand_ins.gputrain_watch.restype = ctypes.c_uint64
        stand_ins.gputrain_is_watched.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
        stand_ins.gputrain_tracer.restype = ctypes.c_void_p
        self._watch, self._is_watched = stand_ins.gputrain_watch, stand_ins.gputrain_is_watched
        self.pieces = Pieces(self._watch, self._is_watched)
        stand_ins.gputrain_noted_at.argtypes = [ctypes.c_uint64]
        stand_ins.gputrain_noted_at.restype = ctypes.c_size_t
        self._noted_at, self._noted = stand_ins.gputrain_noted_at, ctypes.c_uint64.in_dll(stand_ins, "gputrain_noted")
        self._advise = stand_ins.madvise
        self._advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._last_noted: dict[int, int] = {}
        self._addresses: list[int] = []
        self._taken = 0
        torch_core = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so"))
        # This is c10::impl::GPUTrace::set_trace, a hook for tools such as compute-sanitizer. The hook is called for each
        # freed block.
        torch_core["_ZN3c104impl8GPUTrace9set_traceEPKNS0_13PyInterpreterE"](ctypes.c_void_p(stand_ins.gputrain_tracer()))
        torch._C._cuda_synchronize()  # the tracer learns from its first call which function this is

    def find(self, tensor: Tensor) -> Known | None:
        """Find what is known of this tensor, all of it or nothing."""
        if tensor.layout is not torch.strided or tensor.is_nested:
            return None
        start = tensor.data_ptr()
        base = start - int(tensor.storage_offset()) * tensor.itemsize
        known = self._blocks.get(base)
        if known is None:
            return _EMPTY if tensor.numel() == 0 else None
        if not self._is_watched(base, known.number) or self._overwritten(known):
            self._blocks.pop(base, None)
            return None
        if start < known.low or start + extent(tensor) > known.high:
            return None
        if known.value is None:
            return known
        if known.value.dtype != tensor.dtype:
            return None  # a view with another type has the same bytes, but other values
        if tensor.is_conj() or tensor.is_neg():
            return Known(known.low, known.high, _turned(tensor, known.value), dealt=known.dealt, number=known.number)
        return known

    def forget(self, tensor: Tensor) -> None:
        """Note that unknown values were written to this tensor."""
        if tensor.layout is not torch.strided:
            return  # operators write the parts of a sparse tensor, which are tensors themselves
        tensor = elements(tensor)
        start = tensor.data_ptr()
        base = start - int(tensor.storage_offset()) * tensor.itemsize
        self._blocks.pop(base, None)
        if base in self.pieces.blocks:
            self.pieces.drop(base, start, start + extent(tensor))

    def written(self, tensor: Tensor, *, dealt: Dealt | None = None) -> None:
        """Note that this tensor's contents were written to its memory."""
        self._note(tensor, None, dealt=dealt)

    def filled(self, tensor: Tensor, value: Tensor) -> None:
        """Note that all elements of this tensor equal ``value``, a scalar tensor on the host."""
        self._note(tensor, _turned(tensor, value), dealt=None)

    def _note(self, tensor: Tensor, value: Tensor | None, *, dealt: Dealt | None) -> None:
        start = tensor.data_ptr()
        base = start - int(tensor.storage_offset()) * tensor.itemsize
        bytes_ = extent(tensor)
        low, high = start, start + bytes_
        if base in self.pieces.blocks:
            self.pieces.drop(base, low, high)
        before = self._blocks.get(base)
        if before is not None and not (
            self._is_watched(base, before.number) and _same(before.value, value) and not self._overwritten(before)
        ):
            before = None
        if before is not None and before.low <= low and high <= before.high:
            before.dealt = joined((before.dealt, dealt))
            return
        # There are gaps between the elements, so the range would cover other tensors.
        if bytes_ != tensor.numel() * tensor.itemsize:
            self._blocks.pop(base, None)
            return
        if before is not None and low <= before.high and before.low <= high:
            low, high, dealt = min(low, before.low), max(high, before.high), joined((before.dealt, dealt))
        if base:
            noted = self._noted.value
            known = Known(low, high, value, dealt=dealt, number=self._watch(base), noted=noted)
            self._blocks[base] = known
            if dealt and value is None:
                self._bound(base, known)

    def _bound(self, base: int, latest: Known) -> None:
        """Forget the oldest values that follow from made-up choices if they take too much memory."""
        if (before := self._dealt.pop(base, None)) is not None:
            self._dealt_bytes -= before.high - before.low
        while self._dealt and self._dealt_bytes + latest.high - latest.low > _MOST_DEALT_AT_ONCE:
            oldest = next(iter(self._dealt))
            known = self._dealt.pop(oldest)
            self._dealt_bytes -= known.high - known.low
            if self._blocks.get(oldest) is known:
                del self._blocks[oldest]
                if self._is_watched(oldest, known.number):
                    start, end = -(-known.low // mmap.PAGESIZE), known.high // mmap.PAGESIZE
                    if start < end:
                        self._advise(start * mmap.PAGESIZE, (end - start) * mmap.PAGESIZE, _MADV_DONTNEED)
        self._dealt[base] = latest
        self._dealt_bytes += latest.high - latest.low

    def _overwritten(self, known: Known) -> bool:
        """Tell whether a kernel of another library may have written to a range that was filled with one value.

        Results are prepared so. Other values, as lengths that the host computed, are read by most kernels, and stay known.
        """
        count = self._noted.value
        if known.dealt or known.noted == count:
            return False
        for number in range(self._taken, count):
            if address := self._noted_at(number):
                if address not in self._last_noted:
                    bisect.insort(self._addresses, address)
                self._last_noted[address] = number
        self._taken = count
        first, end = (bisect.bisect_left(self._addresses, at) for at in (known.low, known.high))
        if any(self._last_noted[address] >= known.noted for address in self._addresses[first:end]) and _is_filled(known):
            return True
        known.noted = count
        return False


def _is_filled(known: Known) -> bool:
    """Tell whether all of a range is one value, and more than one number or zero."""
    if known.value is not None:
        return True
    held = ctypes.string_at(known.low, known.high - known.low)
    return not any(held) or (len(held) > _NUMBER_BYTES and held[_NUMBER_BYTES:] == held[:-_NUMBER_BYTES])


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one is other:
        return one is other
    return one.dtype == other.dtype and one.item() == other.item()


_EMPTY: Final = Known(0, 0)


def extent(tensor: Tensor) -> int:
    """Return the bytes from the first element of a tensor to behind its last one."""
    if tensor.numel() == 0:
        return 0
    if tensor.is_contiguous():
        return tensor.numel() * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (last + 1) * tensor.itemsize


def _turned(tensor: Tensor, value: Tensor) -> Tensor:
    """Give a value from memory the sign and the imaginary part that a view reads or writes there, as `x.conj()` is one."""
    if tensor.is_conj():
        value = value.conj()
    return torch._neg_view(value) if tensor.is_neg() else value


def is_small(tensor: Tensor, *, dealt: Dealt | None = None) -> bool:
    """Tell whether this tensor is small enough to compute its values, if everything that it comes from is known."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        return False
    bytes_ = tensor.numel() * tensor.itemsize
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return bytes_ <= MOST_FLOAT_BYTES
    return bytes_ <= (MOST_DEALT_BYTES if dealt else MOST_BYTES)


def on_host(tensor: Tensor) -> Tensor:
    """Make a tensor of the CPU that shares this one's memory: an emulated GPU's memory is the host's address space."""
    if not tensor.numel():
        return torch.empty(tensor.size(), dtype=tensor.dtype, device=_CPU)
    place = (tensor.data_ptr() - _FIRST_ADDRESS) // tensor.itemsize
    return _turned(tensor, _all_memory(tensor.dtype).as_strided(tensor.size(), tensor.stride(), place))


@functools.cache
def _all_memory(dtype: torch.dtype) -> Tensor:
    """Make an empty tensor of the CPU whose storage is all memory. A view of it is made faster than a storage."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=dtype, device=_CPU).set_(_storage(_FIRST_ADDRESS, _ADDRESSES), 0, (0,), (1,))


@functools.lru_cache(1 << 10)
def number_as(number: complex, text: str, dtype: torch.dtype | None) -> Tensor:
    """Make a scalar tensor of the CPU, which nothing may write to, because the next call returns the same one.

    Args:
        text: what ``repr`` makes of the number, which tells -0.0 from 0.0, and True from 1.
        dtype: None for the type that torch gives the number.

    Raises:
        RuntimeError: the type does not hold the number, or the CPU does not have the type.
    """
    with torch.inference_mode(False):
        return torch.tensor(number, dtype=dtype, device=_CPU)


def host_bytes(start: int, bytes_: int) -> Tensor:
    """Make a tensor of the CPU of this many bytes at an address."""
    return torch.empty(0, dtype=torch.uint8).set_(_storage(start, bytes_), 0, (bytes_,), (1,))


def _storage(start: int, bytes_: int) -> Any:
    construct: Any = torch._C._construct_storage_from_data_pointer
    return construct(start, _CPU, bytes_)


def count_collective(operator: str, size: int) -> None:
    """Count an exchange of this many bytes with other GPUs that torch's fake group answers instead of NCCL."""
    if "barrier" not in operator:
        name = ctypes.c_char_p(operator.rstrip("_").encode())
        ctypes.CDLL(None).gputrain_counters_add(ctypes.c_char_p(b"collectives"), name, ctypes.c_uint64(size))
