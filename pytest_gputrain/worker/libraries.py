"""Imports the libraries that a case trains with, before its training starts."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.records import Case


def load(case: Case, *, predicted: bool = False, beside_gpu: bool = False) -> None:
    """Import the modules that training ``case`` takes; nothing is computed.

    Libraries import their parts when they are first used, and some make tensors then, which are none of the training's.

    Args:
        predicted: by a prediction, which patches what is there, and cannot know what own code will import.
        beside_gpu: by a process that is to be forked and sees a GPU: without libraries that use it when they are imported,
            since a process that was forked afterwards could not.

    Raises:
        ImportError: a library is missing or broken.
    """
    with _uncollected():
        import pytest_gputrain.worker.run  # noqa: F401

        if case.parallel == "fsdp" or (case.code and predicted):
            importlib.import_module("torch.distributed.fsdp")
        if case.code:
            return
        for part in architectures()[case.model].parts.values():
            if part.library != "own":
                getattr(importlib.import_module(part.library), part.model_class)
        if beside_gpu:
            return
        if case.method in ("lora", "qlora"):
            _load_bitsandbytes()
            importlib.import_module("peft")
        if case.parallel.startswith("zero"):
            importlib.import_module("deepspeed")


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """A context without garbage collection, which takes a tenth of the time of imports and finds nothing."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _load_bitsandbytes() -> None:
    """Import it, where it is installed, without a compiler.

    While it is imported, it hands the kernels that it has for processors without their own to `torch.compile`, which loads
    for two seconds, and compiles in the first step if there is a compiler. GPUs have kernels of their own.
    """
    import torch

    with mock.patch.object(torch, "compile", _as_it_is), contextlib.suppress(ImportError):
        importlib.import_module("bitsandbytes")


def _as_it_is(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return _as_it_is if function is None else function
