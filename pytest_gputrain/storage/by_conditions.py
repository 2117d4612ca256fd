"""Keeps figures that depend on nothing but the case and some conditions, which many cases share.

Such are the versions of the libraries that ran. A case has figures for each of the last few conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Struct

from pytest_gputrain.records.emulated import RecordedRuns
from pytest_gputrain.records.recorded import Recorded
from pytest_gputrain.storage.baselines import SuiteStore

MOST_CONDITIONS: Final = 4
"""Figures that are kept of a case, for test environments that differ in their libraries."""

_Record = TypeVar("_Record", bound=Recorded | RecordedRuns)
_Entry = TypeVar("_Entry", bound=Struct)


class StoreByConditions(SuiteStore[_Record, _Entry]):
    """Figures whose devices are platforms; an update replaces those under the same conditions.

    What entries share are their conditions, by which they stand in the file.
    """

    def _stored(self, entries: Iterable[tuple[str, _Entry]]) -> dict[str, dict[str, Any]]:
        every = ((reference, msgspec.to_builtins(entry)) for reference, entry in entries)
        shared = self.shared_type.__struct_fields__
        return {
            reference: {name: value for name, value in fields.items() if name not in shared} for reference, fields in every
        }

    def _fields(self, stored: dict[str, dict[str, Any]], find: Callable[[Any], dict[str, Any]]) -> Iterator[dict[str, Any]]:
        return ({**fields, **find(reference)} for reference, fields in stored.items())

    def _merged(self, before: _Record | None, new: _Record) -> _Record:
        if before is None or before.case.identity() != new.case.identity():
            return new
        if all(entry in self._entries(before) for entry in self._entries(new)):
            return before
        replaced = [self._shared(entry) for entry in self._entries(new)]
        kept = [entry for entry in self._entries(before) if self._shared(entry) not in replaced]
        return self._record("", new.case, new.scale, (*kept, *self._entries(new))[-MOST_CONDITIONS:])
