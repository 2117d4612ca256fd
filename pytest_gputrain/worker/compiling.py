"""Applies ``torch.compile`` to the repeated blocks of a model, and notes whether own code calls it."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any, Final
from unittest import mock

import torch
from torch import nn

from pytest_gputrain.cases.libraries import LIBRARIES
from pytest_gputrain.records import Case
from pytest_gputrain.utils.units import format_seconds

_LONG_SECONDS: Final = 10.0
"""The seconds of compiling from which on the message of a failure mentions them."""
_RECOMPILATIONS: Final = 64
"""Blocks of a model differ in more ways than the eight that torch compiles for one function before it gives up."""


def compile_in_place(parts: Sequence[nn.Module], mode: str, device: torch.device) -> None:
    """Have torch compile each block when it first runs. Equal blocks are compiled once, in seconds instead of minutes.

    Args:
        mode: of torch.compile. On a CPU its graphs are traced, forward and backward, and run as they are: making code for a
            CPU needs a compiler and takes longer than a tiny model trains.
    """
    # cache_size_limit is the old name of recompile_limit. Newer versions of torch accept both names.
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, _RECOMPILATIONS)
    # A UNet's blocks are lists of modules, which are never called themselves.
    for inner in (inner for part in parts for inner in (part if isinstance(part, nn.ModuleList) else [part])):
        if device.type == "cpu":
            inner.compile(backend="aot_eager")
        else:
            inner.compile(mode=mode)


def compile_time() -> str:
    """Return the time that torch.compile has taken in this process, as the end of a sentence; empty if it was short."""
    utils: Any = sys.modules.get("torch._dynamo.utils")
    seconds = utils.calculate_time_spent().get("total_wall_time", 0.0) if utils else 0.0
    return f"; torch.compile took {format_seconds(seconds)} to compile before" if seconds >= _LONG_SECONDS else ""


def uncompiled(case: Case) -> contextlib.AbstractContextManager[Any]:
    """Provide a context in which a compiled model runs uncompiled, and so with other operators."""
    return contextlib.nullcontext() if case.compile == "off" else torch.compiler.set_stance("force_eager")


class CompileCalls:
    """Records whether own code passes something to `torch.compile`, by its name, as a decorator or by ``model.compile()``.

    Args:
        on_cpu: whether nothing is compiled but in `traced`, where graphs are made and run as they are.
    """

    def __init__(self, *, on_cpu: bool = False) -> None:
        self.any = False
        self._on_cpu = on_cpu

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Provide a context that records calls of `torch.compile`. Own code must be imported in it."""
        real = torch.compile
        with contextlib.ExitStack() as stack:

            @functools.wraps(real)
            def compile_(*args: Any, **kwargs: Any) -> Any:
                if _a_library_is_imported(sys._getframe(1)):
                    return real(*args, **kwargs)
                if self._on_cpu:
                    kwargs = {name: value for name, value in kwargs.items() if name not in ("mode", "options")}
                    kwargs["backend"] = "eager"
                    if not self.any:
                        stack.enter_context(torch.compiler.set_stance("force_eager"))
                self.any = True
                return real(*args, **kwargs)

            stack.enter_context(mock.patch.object(torch, "compile", compile_))
            yield

    def traced(self) -> contextlib.AbstractContextManager[Any]:
        """Provide a context in which functions that own code compiles on a CPU are traced."""
        return torch.compiler.set_stance("default") if self.any else contextlib.nullcontext()

    def paused(self) -> contextlib.AbstractContextManager[Any]:
        """Provide a context in which functions that own code compiles run uncompiled.

        Where each operator is followed torch compiles nothing, and with ``fullgraph=True`` it raises an error for that.
        """
        return torch.compiler.set_stance("force_eager") if self.any else contextlib.nullcontext()


def _a_library_is_imported(frame: FrameType | None) -> bool:
    """Tell whether the call comes from the top level of a library. Steps may never use what libraries compile for
    themselves."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
            return True
        frame = frame.f_back
    return False
