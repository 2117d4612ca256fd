"""Finds out which truth value keeps a program from raising an error."""

from __future__ import annotations

import dis
import functools
from types import CodeType, FrameType
from typing import Final

from .program_lines import outer_frame

_MOST_INSTRUCTIONS: Final = 100
"""If the message of an error takes more instructions than this, the error is not found."""
_JUMPS: Final = frozenset((*dis.hasjrel, *dis.hasjabs))


def truth_that_raises_nothing(frame: FrameType | None) -> bool | None:
    """Return the truth value with which the ``assert`` or the ``if ...: raise`` goes on that reads it.

    None if the value decides something else.

    Args:
        frame: where the value is read, or a frame of this package that it called.
    """
    reading = outer_frame(frame)
    return _of_instruction(reading.f_code, reading.f_lasti) if reading else None


@functools.lru_cache(1 << 10)
def _of_instruction(code: CodeType, offset: int) -> bool | None:
    all_instructions = list(dis.get_instructions(code))
    following = [one for one in all_instructions if one.offset >= offset]
    # A call of `bool`, and from Python 3.13 on an instruction of its own, reads the value before the jump.
    while following and following[0].opname in ("PRECALL", "CALL", "TO_BOOL"):
        del following[0]
    jump = following[0] if following else None
    if jump is None or not jump.opname.startswith("POP_JUMP") or not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    going_on_raises = _raises(following[1:])
    if going_on_raises == _raises([one for one in all_instructions if one.offset >= jump.argval]):
        return None
    return jump.opname.endswith("IF_TRUE") == going_on_raises


def _raises(instructions: list[dis.Instruction]) -> bool:
    """Tell whether these instructions raise an error before they jump or return."""
    for one in instructions[:_MOST_INSTRUCTIONS]:
        if one.opname == "RAISE_VARARGS":
            return True
        # To raise StopIteration is how an iterator ends.
        if one.opcode in _JUMPS or one.opname.startswith(("RETURN", "YIELD")) or one.argval == "StopIteration":
            return False
    return False
