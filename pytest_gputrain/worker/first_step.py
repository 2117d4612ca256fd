"""Finds where the first step of a generator begins: in the body of the loop that yields, whoever wrote that loop."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType, GeneratorType
from typing import Any


def has_begun(generator: GeneratorType[Any, Any, Any]) -> bool | None:
    """Tell whether a generator that runs on this thread has entered the body of a loop that yields.

    ``yield from`` and ``for ... in`` another generator lead to the loop of that one. What makes a loop's first item is a
    part of its step, as it is in each further step.

    Returns:
        None if its source is not known, or has a ``yield`` in no loop.
    """
    frames: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not generator.gi_frame:
        frames.append(frame)
        frame = frame.f_back
    return None if frame is None else _has_begun([frame, *reversed(frames)])


def _has_begun(frames: Sequence[FrameType]) -> bool | None:
    """Tell whether the generator of the first frame has begun its step. Each further frame was called by the frame
    before."""
    frame, *called = frames
    yields = _yields_of(frame.f_code)
    if yields is None:
        return None
    if any(frame.f_lineno in lines for lines in yields.bodies):
        return True
    if called and any(frame.f_lineno in lines for lines in yields.delegating):
        code = called[0].f_code
        return _has_begun(called) if code.co_flags & inspect.CO_GENERATOR else code.co_name == "__next__"
    return None if yields.outside else False


@dataclass(slots=True)
class _Yields(ast.NodeVisitor):
    """The lines of a generator from which it yields."""

    bodies: list[range] = field(default_factory=list)
    """The lines of the innermost loops that yield, without their headers."""
    delegating: list[range] = field(default_factory=list)
    """The lines of these headers, and those of ``yield from``: another generator may run there."""
    outside: bool = False
    """Whether a ``yield`` is in no loop."""
    _loops: list[ast.For | ast.While] = field(default_factory=list)

    def visit_For(self, node: ast.For | ast.While) -> None:
        self._loops.append(node)
        for part in node.body:
            self.visit(part)
        self._loops.pop()
        for part in node.orelse:
            self.visit(part)

    visit_While = visit_For

    def visit_Yield(self, node: ast.Yield) -> None:
        if not self._loops:
            self.outside = True
            return
        loop = self._loops[-1]
        first = loop.body[0].lineno
        self.bodies.append(range(first, (loop.body[-1].end_lineno or first) + 1))
        self.delegating.append(range(loop.lineno, first))

    def visit_YieldFrom(self, node: ast.YieldFrom) -> None:
        self.delegating.append(range(node.lineno, (node.end_lineno or node.lineno) + 1))

    def visit_FunctionDef(self, node: ast.AST) -> None:
        """Skip an inner function, whose yields are its own."""

    visit_AsyncFunctionDef = visit_ClassDef = visit_Lambda = visit_FunctionDef


@functools.cache
def _yields_of(code: CodeType) -> _Yields | None:
    """Return the lines from which a function yields; None if its source is not known."""
    for node in ast.walk(_parsed(code.co_filename)):
        if isinstance(node, ast.FunctionDef) and _first_line(node) == code.co_firstlineno and node.name == code.co_name:
            yields = _Yields()
            for part in node.body:
                yields.visit(part)
            return yields
    return None


def _first_line(function: ast.FunctionDef) -> int:
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


@functools.cache
def _parsed(file: str) -> ast.AST:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # The file was changed after its import.
        return ast.Module(body=[], type_ignores=[])
