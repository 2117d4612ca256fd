"""``torch.compile`` of the parts of a model that repeat."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import nn

from pytest_gputrain.records import Case

_RECOMPILATIONS: Final = 64
"""Blocks of a model differ in more ways than the eight that torch compiles for one function before it gives up."""


def compile_in_place(parts: Sequence[nn.Module], mode: str, device: torch.device) -> None:
    """Have each part compiled when it first runs, all that are alike once: seconds, where a whole model takes minutes.

    Args:
        mode: of torch.compile. On a CPU its graphs are traced, forward and backward, and run as they are: making code for a
            CPU needs a compiler and takes longer than a tiny model trains.
    """
    # Its first name, which later versions of torch keep.
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, _RECOMPILATIONS)
    # The middle of a UNet is lists of blocks, which do nothing themselves.
    for inner in (inner for part in parts for inner in (part if isinstance(part, nn.ModuleList) else [part])):
        if device.type == "cpu":
            inner.compile(backend="aot_eager")
        else:
            inner.compile(mode=mode)


def uncompiled(case: Case) -> contextlib.AbstractContextManager[Any]:
    """A context in which a compiled model runs as it is: what is compiled has operators of its own, and a graph none."""
    return contextlib.nullcontext() if case.compile == "off" else torch.compiler.set_stance("force_eager")
