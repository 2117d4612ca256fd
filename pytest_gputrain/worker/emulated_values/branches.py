"""Finds out what a truth value decides: whether a program raises an error, or whether a loop goes on."""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import linecache
from types import CodeType, FrameType
from typing import Final

from .program_lines import outer_frame

_MOST_INSTRUCTIONS: Final = 100
"""If the message of an error takes more instructions than this, the error is not found."""
_JUMPS: Final = frozenset((*dis.hasjrel, *dis.hasjabs))

Condition = tuple[str, tuple[int, int]]
"""The condition of a ``while`` loop: its file, and where it begins."""


def truth_that_raises_nothing(frame: FrameType | None) -> bool | None:
    """Return the truth value with which the ``assert`` or the ``if ...: raise`` goes on that reads it.

    None if the value decides something else.

    Args:
        frame: where the value is read, or a frame of this package that it called.
    """
    reading = outer_frame(frame)
    return _of_instruction(reading.f_code, reading.f_lasti) if reading else None


def while_condition(frame: FrameType | None) -> Condition | None:
    """Return which ``while`` loop's condition is computed by the instruction that a frame, or one that it called, is at.

    None if it is no such condition, or the source is not there.
    """
    reading = outer_frame(frame)
    return _condition_at(reading.f_code, reading.f_lasti) if reading else None


@functools.lru_cache(1 << 10)
def _condition_at(code: CodeType, offset: int) -> Condition | None:
    line, end_line, column, end_column = next(itertools.islice(code.co_positions(), offset // 2, None))
    if line is None or end_line is None or column is None or end_column is None:
        return None
    for begin, end in _conditions(code.co_filename):
        if begin <= (line, column) and (end_line, end_column) <= end:
            return code.co_filename, begin
    return None


@functools.lru_cache(1 << 6)
def _conditions(file: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Return the places, from line and column to line and column, of the conditions of a file's ``while`` loops."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return []
    tests = [node.test for node in ast.walk(tree) if isinstance(node, ast.While)]
    return [
        ((test.lineno, test.col_offset), (test.end_lineno or test.lineno, test.end_col_offset or test.col_offset))
        for test in tests
    ]


@functools.lru_cache(1 << 10)
def _of_instruction(code: CodeType, offset: int) -> bool | None:
    all_instructions = list(dis.get_instructions(code))
    following = [one for one in all_instructions if one.offset >= offset]
    # A call of `bool` or `item`, and from Python 3.13 on an instruction of its own, reads the value before the jump.
    for name in ("CALL", "TO_BOOL"):
        if following and following[0].opname == name:
            del following[0]
    jump = following[0] if following else None
    if jump is None or not jump.opname.startswith("POP_JUMP") or not jump.opname.endswith(("IF_TRUE", "IF_FALSE")):
        return None
    going_on_raises = _raises(following[1:])
    if going_on_raises == _raises([one for one in all_instructions if one.offset >= jump.argval]):
        return None
    return jump.opname.endswith("IF_TRUE") == going_on_raises


def _raises(instructions: list[dis.Instruction]) -> bool:
    """Tell whether these instructions raise an assertion or what is called an error, before they jump or return.

    Other exceptions, such as StopIteration or one that says that training has converged, are how programs end a loop.
    """
    is_error = False
    for one in instructions[:_MOST_INSTRUCTIONS]:
        if one.opname == "RAISE_VARARGS":
            return is_error
        if one.opcode in _JUMPS or one.opname.startswith(("RETURN", "YIELD")):
            return False
        is_error |= one.opname == "LOAD_ASSERTION_ERROR" or one.argrepr.removesuffix(" + NULL").endswith("Error")
    return False
