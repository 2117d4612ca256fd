"""Reads symbols of shared libraries and object files in the ELF format, as nm and readelf do where they are installed."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple, Self

from pytest_gputrain.utils.errors import CannotEmulate

_MAGIC: Final = b"\x7fELF\x02\x01"
"""The first bytes of 64-bit little-endian files, the only kind read here."""

_SYMTAB, _DYNAMIC, _DYNSYM, _VERNEED, _VERSYM = 2, 6, 11, 0x6FFFFFFE, 0x6FFFFFFF
"""Types of sections."""

_NEEDED: Final = 1
"""Tag of the dynamic section."""

_HIDDEN_VERSION: Final = 0x8000
_LOCAL: Final = 0


class NotElf(Exception):
    """The file is no 64-bit little-endian ELF file, or it is damaged."""


class Import(NamedTuple):
    """A symbol that a library imports from another one."""

    name: str
    version: str
    """The version of the symbol; empty if its library has no versions of symbols."""
    soname: str
    """The library that defines this version; empty if there is none."""


class _Section(NamedTuple):
    name: str
    kind: int
    offset: int
    size: int
    link: int
    info: int


def check_executable(library: Path, cache: Path) -> None:
    """Check that code may run from the disk of a library. The loader's own error does not name the disk.

    Raises:
        CannotEmulate: the disk forbids it.
        OSError: the library cannot be read.
    """
    with library.open("rb") as file:
        try:
            mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_EXEC).close()
        except PermissionError:
            raise CannotEmulate(
                f"no program may run from {cache} (its disk is mounted with noexec); set XDG_CACHE_HOME to another disk"
            ) from None


class Elf:
    """An open ELF file.

    Raises:
        NotElf: it is something else.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            try:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise NotElf(f"{path} is empty") from None
        try:
            if self._data[: len(_MAGIC)] != _MAGIC:
                raise NotElf(f"{path} is no 64-bit ELF file")
            self._sections = self._read_sections()
        except (struct.error, IndexError, UnicodeDecodeError):
            self._data.close()
            raise NotElf(f"{path} is a damaged ELF file") from None
        except NotElf:
            self._data.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._data.close()

    def _read_sections(self) -> list[_Section]:
        (table,) = struct.unpack_from("<Q", self._data, 0x28)
        size, count, names_at = struct.unpack_from("<HHH", self._data, 0x3A)
        headers = [struct.unpack_from("<IIQQQQIIQQ", self._data, table + size * number) for number in range(count)]
        names = headers[names_at][4]
        return [
            _Section(self._text(names + name), kind, offset, length, link, info)
            for name, kind, _, _, offset, length, link, info, _, _ in headers
        ]

    def _text(self, offset: int) -> str:
        return self._data[offset : self._data.find(b"\0", offset)].decode()

    def _of_kind(self, kind: int) -> _Section | None:
        return next((section for section in self._sections if section.kind == kind), None)

    def needed(self) -> list[str]:
        """Return the names of the libraries that the loader loads with this one."""
        section = self._of_kind(_DYNAMIC)
        if section is None:
            return []
        texts = self._sections[section.link].offset
        entries = struct.iter_unpack("<QQ", self._data[section.offset : section.offset + section.size])
        return [self._text(texts + value) for tag, value in entries if tag == _NEEDED]

    def imports(self) -> list[Import]:
        """Return the symbols that the loader looks up in other libraries."""
        symbols, versions = self._of_kind(_DYNSYM), self._of_kind(_VERSYM)
        if symbols is None:
            return []
        names = dict(self._needed_versions())
        numbers = None
        if versions is not None:
            numbers = struct.unpack_from(f"<{versions.size // 2}H", self._data, versions.offset)
        return [
            Import(name, *names.get(numbers[at] & ~_HIDDEN_VERSION, ("", "")) if numbers else ("", ""))
            for at, name, _, section in self._symbols(symbols)
            if name and section == 0
        ]

    def defined(self) -> set[str]:
        """Return the global symbols that an object file or a shared library defines."""
        symbols = self._of_kind(_SYMTAB) or self._of_kind(_DYNSYM)
        if symbols is None:
            return set()
        return {name for _, name, binding, section in self._symbols(symbols) if name and section and binding != _LOCAL}

    def constants(self) -> bytes:
        """Return the constants, which include the names of functions that the library looks up while it runs."""
        return b"\0".join(
            self._data[section.offset : section.offset + section.size]
            for section in self._sections
            if section.name.startswith(".rodata")
        )

    def _symbols(self, table: _Section) -> Iterator[tuple[int, str, int, int]]:
        """Return the number, name, binding and section of each symbol."""
        texts = self._sections[table.link].offset
        entries = struct.iter_unpack("<IBBHQQ", self._data[table.offset : table.offset + table.size])
        for at, (name, info, _, section, _, _) in enumerate(entries):
            yield at, self._text(texts + name), info >> 4, section

    def _needed_versions(self) -> Iterator[tuple[int, tuple[str, str]]]:
        """Return each version of a symbol that is needed: its number, its name and the library that defines it."""
        section = self._of_kind(_VERNEED)
        if section is None:
            return
        texts, at = self._sections[section.link].offset, section.offset
        for _ in range(section.info):
            _, count, file, first, after = struct.unpack_from("<HHIII", self._data, at)
            auxiliary = at + first
            for _ in range(count):
                _, _, number, name, following = struct.unpack_from("<IHHII", self._data, auxiliary)
                yield number & ~_HIDDEN_VERSION, (self._text(texts + name), self._text(texts + file))
                auxiliary += following
            at += after
