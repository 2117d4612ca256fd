"""Records kept out of memory: the raw figures of ten thousand cases are more than a test runner may take."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import IO, Any, Final, Generic, NamedTuple, TypeVar, overload

import msgspec

_Key = TypeVar("_Key")
_Record = TypeVar("_Record")

_MEMORY_BYTES: Final = 2 << 20
"""Of the records that come first: a small run needs no file."""


class _Place(NamedTuple):
    """In the file."""

    begin: int
    length: int


class _Whole(NamedTuple):
    """What MessagePack cannot say: an integer of more than 64 bits, which JSON has."""

    record: Any


class Shelf(Sequence[_Record], Generic[_Record]):
    """Records in a nameless temporary file; each look at one reads it anew. What the disk does not take stays in memory.

    Args:
        type_: of the records.
    """

    def __init__(self, type_: Any) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(type_).decode
        self._records: list[bytes | _Place | _Whole] = []
        self._room = _MEMORY_BYTES
        self._file: IO[bytes] | None = None
        self._end = 0

    def append(self, record: _Record) -> None:
        self._records.append(self._put(record))

    def __setitem__(self, index: int, record: _Record) -> None:
        self._records[index] = self._put(record)

    @overload
    def __getitem__(self, index: int) -> _Record: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_Record]: ...
    def __getitem__(self, index: int | slice) -> _Record | Sequence[_Record]:
        if isinstance(index, slice):
            return Picked(self, range(len(self))[index])
        return self._get(self._records[index])

    def __len__(self) -> int:
        return len(self._records)

    def _put(self, record: _Record) -> bytes | _Place | _Whole:
        try:
            data = self._encode(record)
        except OverflowError:
            return _Whole(record)
        if len(data) <= self._room:
            self._room -= len(data)
            return data
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="gputrain-", buffering=0)  # noqa: SIM115 - as long as this
                weakref.finalize(self, self._file.close)
            if os.pwrite(self._file.fileno(), data, self._end) < len(data):
                return data
        except OSError:
            return data
        place = _Place(self._end, len(data))
        self._end += len(data)
        return place

    def _get(self, kept: bytes | _Place | _Whole) -> _Record:
        if isinstance(kept, _Place):
            assert self._file is not None, "it has taken the record"
            kept = os.pread(self._file.fileno(), kept.length, kept.begin)
        record: _Record = kept.record if isinstance(kept, _Whole) else self._decode(kept)
        return record


class Cabinet(MutableMapping[_Key, _Record]):
    """The same by keys, in the order in which they came first."""

    def __init__(self, type_: Any) -> None:
        self._shelf: Shelf[_Record] = Shelf(type_)
        self._places: dict[_Key, int] = {}

    def __setitem__(self, key: _Key, record: _Record) -> None:
        if key in self._places:
            self._shelf[self._places[key]] = record
            return
        self._shelf.append(record)
        self._places[key] = len(self._shelf) - 1

    def __getitem__(self, key: _Key) -> _Record:
        return self._shelf[self._places[key]]

    def __delitem__(self, key: _Key) -> None:
        del self._places[key]

    def __contains__(self, key: object) -> bool:
        return key in self._places

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class Picked(Sequence[_Record], Generic[_Record]):
    """Some of a sequence's records in an order of their own, still looked at one by one."""

    def __init__(self, of: Sequence[_Record], indices: Sequence[int]) -> None:
        self._of = of
        self._indices = indices

    @overload
    def __getitem__(self, index: int) -> _Record: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_Record]: ...
    def __getitem__(self, index: int | slice) -> _Record | Sequence[_Record]:
        if isinstance(index, slice):
            return Picked(self._of, self._indices[index])
        return self._of[self._indices[index]]

    def __iter__(self) -> Iterator[_Record]:
        return (self._of[index] for index in self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def those(self, wanted: Callable[[_Record], bool]) -> Picked[_Record]:
        """The records that are wanted."""
        return Picked(self._of, [index for index in self._indices if wanted(self._of[index])])
