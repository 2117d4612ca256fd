"""Keeps long lists and dictionaries of records in a temporary file, because those of ten thousand cases would fill the
memory.
"""

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
"""Bytes of records that stay in memory: a small run needs no file."""


class _FileRange(NamedTuple):
    """Says where a record lies in the file."""

    begin: int
    length: int


class _Unencodable(NamedTuple):
    """A record that MessagePack cannot encode: one with an integer of more than 64 bits, which JSON has."""

    record: Any


class SpilledList(Sequence[_Record], Generic[_Record]):
    """A list of records in a nameless temporary file, which each access reads. What the disk does not take stays in memory.

    Args:
        type_: of the records.
    """

    def __init__(self, type_: Any) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(type_).decode
        self._records: list[bytes | _FileRange | _Unencodable] = []
        self._memory_left = _MEMORY_BYTES
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
            return SelectedRecords(self, range(len(self))[index])
        return self._get(self._records[index])

    def __len__(self) -> int:
        return len(self._records)

    def _put(self, record: _Record) -> bytes | _FileRange | _Unencodable:
        try:
            data = self._encode(record)
        except OverflowError:
            return _Unencodable(record)
        if len(data) <= self._memory_left:
            self._memory_left -= len(data)
            return data
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="gputrain-", buffering=0)  # noqa: SIM115 - as long as this
                weakref.finalize(self, self._file.close)
            if os.pwrite(self._file.fileno(), data, self._end) < len(data):
                return data
        except OSError:
            return data
        place = _FileRange(self._end, len(data))
        self._end += len(data)
        return place

    def _get(self, kept: bytes | _FileRange | _Unencodable) -> _Record:
        if isinstance(kept, _FileRange):
            assert self._file is not None, "it has taken the record"
            kept = os.pread(self._file.fileno(), kept.length, kept.begin)
        record: _Record = kept.record if isinstance(kept, _Unencodable) else self._decode(kept)
        return record


class SpilledDict(MutableMapping[_Key, _Record]):
    """A dictionary of records in a `SpilledList`, in the order in which the keys came first."""

    def __init__(self, type_: Any) -> None:
        self._values: SpilledList[_Record] = SpilledList(type_)
        self._indices: dict[_Key, int] = {}

    def __setitem__(self, key: _Key, record: _Record) -> None:
        if key in self._indices:
            self._values[self._indices[key]] = record
            return
        self._values.append(record)
        self._indices[key] = len(self._values) - 1

    def __getitem__(self, key: _Key) -> _Record:
        return self._values[self._indices[key]]

    def __delitem__(self, key: _Key) -> None:
        del self._indices[key]

    def __contains__(self, key: object) -> bool:
        return key in self._indices

    def __iter__(self) -> Iterator[_Key]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)


class SelectedRecords(Sequence[_Record], Generic[_Record]):
    """Some records of a sequence in an order of their own, still read one by one."""

    def __init__(self, of: Sequence[_Record], indices: Sequence[int]) -> None:
        self._of = of
        self._indices = indices

    @overload
    def __getitem__(self, index: int) -> _Record: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_Record]: ...
    def __getitem__(self, index: int | slice) -> _Record | Sequence[_Record]:
        if isinstance(index, slice):
            return SelectedRecords(self._of, self._indices[index])
        return self._of[self._indices[index]]

    def __iter__(self) -> Iterator[_Record]:
        return (self._of[index] for index in self._indices)

    def __len__(self) -> int:
        return len(self._indices)

    def those(self, wanted: Callable[[_Record], bool]) -> SelectedRecords[_Record]:
        """The records that are wanted."""
        return SelectedRecords(self._of, [index for index in self._indices if wanted(self._of[index])])
