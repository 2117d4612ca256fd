"""Finds the offsets of CPython's structures, so that the stand-ins can read the Python stack of a thread.

The offsets in CPython's structures differ between its versions. They are found by comparing memory with what Python itself
says of this module's own frames, and then checked: the stand-ins' answer has to be Python's.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any, BinaryIO, Final

_WORD: Final = 8
_FRAME_OF_OBJECT: Final = 3 * _WORD
"""Where a frame object has the address of the interpreter's frame, behind the object's head and the frame object before."""
_KINDS: Final = {"a": 0b11001, "é": 0b01001, "Ā": 0b01010, "😀": 0b01100}
"""The bits of a string's state: the bytes of a character, whether it is compact, and whether it is ASCII."""


class LayoutUnknown(Exception):
    """The structures of this version of Python were not found in memory."""


def read_frames(library: Any) -> None:
    """Have the stand-ins read the Python stacks of threads from now on.

    Args:
        library: the stand-ins.

    Raises:
        LayoutUnknown: they cannot, with this Python.
    """
    try:
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            offsets = _Finder(memory).layout()
    except (OSError, StopIteration) as error:
        raise LayoutUnknown(f"Python {sys.version.split()[0]} keeps its frames elsewhere ({error!r})") from None
    library.gputrain_counters_python((ctypes.c_int * len(offsets))(*offsets), ctypes.c_void_p(id(CodeType)))
    found = stack(library, library.gputrain_counters_stack())
    # The first frame is left out, because its line number may differ between the two calls.
    if found[1:] != _expected(sys._getframe())[1:]:
        library.gputrain_counters_no_stacks()
        raise LayoutUnknown(f"the frames of Python {sys.version.split()[0]} are not read as Python tells them")


def stack(library: Any, number: int) -> list[tuple[int, str, str]]:
    """Return the lines of a stack, the innermost first, each with its file and the qualified name of its function."""
    rows = (row.split("\t") for row in text(library.gputrain_counters_places, ctypes.c_uint32(number)).splitlines())
    return [(int(line), file, function) for line, file, function in rows]


def text(function: Any, *arguments: Any) -> str:
    """Return the text that a function of the stand-ins writes."""
    function.restype = ctypes.c_size_t
    size = function(*arguments, None, ctypes.c_size_t(0))
    buffer = ctypes.create_string_buffer(size + 1)
    function(*arguments, buffer, ctypes.c_size_t(size + 1))
    return buffer.value.decode("utf-8", "replace")


def _expected(frame: FrameType | None) -> list[tuple[int, str, str]]:
    found: list[tuple[int, str, str]] = []
    while frame is not None and len(found) < 256:
        found.append((frame.f_lineno, frame.f_code.co_filename, frame.f_code.co_qualname))
        frame = frame.f_back
    return found


class _Finder:
    """Searches the memory of this process for Python's structures. The kernel reads it, so that a wrong address only raises
    an error."""

    def __init__(self, memory: BinaryIO) -> None:
        self._memory = memory

    def layout(self) -> tuple[int, ...]:
        """Return the offsets, in the order of ``struct layout`` in counters.c."""

        outer = sys._getframe().f_back
        assert outer is not None
        assert outer.f_back is not None
        code = outer.f_code
        in_frame = self._words(self._word(id(outer) + _FRAME_OF_OBJECT), 16)
        in_code = self._words(id(code), 40)
        instruction, instructions = self._instruction(in_frame, outer)
        # This is the code of a method, because only then does the qualified name differ from the name.
        own = sys._getframe().f_code
        state, shift = self._state_of_strings()
        return (
            *self._frames_of_thread(),
            self._offset((word & ~7 for word in in_frame), id(code)),
            instruction,
            self._offset(in_frame, self._word(id(outer.f_back) + _FRAME_OF_OBJECT)),
            self._offset(in_code, id(code.co_filename)),
            self._offset(self._words(id(own), 40), id(own.co_qualname)),
            instructions,
            2 * _WORD,
            state,
            shift,
            "".__sizeof__() - 1,
            (chr(0xE9) * 3).__sizeof__() - 4,
        )

    def _words(self, address: int, count: int) -> tuple[int, ...]:
        self._memory.seek(address)
        return tuple(memoryview(self._memory.read(count * _WORD)).cast("Q"))

    def _word(self, address: int) -> int:
        return self._words(address, 1)[0]

    def _offset(self, words: Iterable[int], wanted: int) -> int:
        return next(place * _WORD for place, word in enumerate(words) if word == wanted)

    def _frames_of_thread(self) -> tuple[int, int]:
        """Return the offset of the current frame, or of a pointer to it, in the state of a thread."""
        ctypes.pythonapi.PyThreadState_Get.restype = ctypes.c_void_p
        state = ctypes.pythonapi.PyThreadState_Get()
        frame, memory = self._word(id(sys._getframe()) + _FRAME_OF_OBJECT), self._memory
        # No other Python function may run while the memory is read, because it would become the current frame.
        memory.seek(state)
        words = memoryview(memory.read(40 * _WORD)).cast("Q")
        for place, word in enumerate(words):
            if word == frame:
                return place * _WORD, -1
            try:
                memory.seek(word)
                near = memoryview(memory.read(3 * _WORD)).cast("Q")
            except (OSError, OverflowError, TypeError):
                continue
            for nearby, held in enumerate(near):
                if held == frame:
                    return place * _WORD, nearby * _WORD
        raise StopIteration("the current frame of a thread")

    def _instruction(self, in_frame: Iterable[int], frame: FrameType) -> tuple[int, int]:
        """Return the offsets of the instruction in a frame, and of the first instruction in a code object."""
        start = id(frame.f_code)
        size = frame.f_code.__sizeof__()
        place, word = next((place, word) for place, word in enumerate(in_frame) if start < word < start + size)
        return place * _WORD, word - start - frame.f_lasti

    def _state_of_strings(self) -> tuple[int, int]:
        """Return the offset of a string's state, and the lowest bit of the kind in that state."""
        at = 4 * _WORD
        states = [(self._word(id(text)) and self._word(id(text) + at) & 0xFFFFFFFF, bits) for text, bits in _KINDS.items()]
        return at, next(shift for shift in range(27) if all(state >> shift & 31 == bits for state, bits in states))
