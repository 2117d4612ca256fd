"""Imports the libraries that a case trains with, before its training starts."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

from pytest_gputrain.cases.libraries import missing
from pytest_gputrain.cases.model_config import declare
from pytest_gputrain.cases.validation import EIGHT_BIT
from pytest_gputrain.records import Case, Task
from pytest_gputrain.records.case import ADAPTING
from pytest_gputrain.utils.errors import WrongTorch
from pytest_gputrain.utils.torch_beside import LOCK, SITE, SITE_VARIABLE


def load_for(task: Task, *, to_be_forked: bool = False) -> None:
    """Import the modules that the task's process needs before it builds anything, and register the case's model.

    Args:
        to_be_forked: whether this process trains nothing itself, and workers are forked from it.

    Raises:
        ImportError: a library is missing or broken.
    """
    load(
        task.case,
        beside_gpu=to_be_forked and bool(task.emulated),
        model_config=task.model_config,
    )
    _check_torch(emulated=bool(task.emulated))


def _check_torch(*, emulated: bool) -> None:
    """Check that torch is the build for emulated GPUs if and only if the task needs it."""
    import torch

    site = Path(torch.__file__).parents[1]
    expected = os.environ.get(SITE_VARIABLE)
    if emulated and expected and (site / "torch").resolve() != Path(expected, "torch").resolve():
        raise WrongTorch(
            f"the emulated GPU is for the torch in {expected}, and this worker imported the one in {site}; a test that sets "
            "PYTHONPATH has to keep what is in it, and gputrain emulate --install mends what was removed"
        )
    if not emulated and site.name == SITE and (site.parent / LOCK).exists():
        raise WrongTorch(
            f"this worker imported the torch in {site}, which is for emulated GPUs alone; take it out of PYTHONPATH"
        )


def load(
    case: Case,
    *,
    beside_gpu: bool = False,
    model_config: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Import the modules that training ``case`` needs, and register its model. Nothing is computed.

    Libraries import their parts when they are first used, and some make tensors then, which are none of the training's.

    Args:
        beside_gpu: by a process that is to be forked and sees an emulated GPU, which it must not use: a process that was
            forked afterwards could not.
        model_config: of the task, for a model that is no name of the zoo.

    Raises:
        ImportError: a library is missing or broken.
    """
    if model_config:
        declare(case.model, dict(model_config))
    if names := missing([case]):
        raise ModuleNotFoundError(f"no module named {' or '.join(names)}")
    with _uncollected(), _asking_no_driver() if beside_gpu else contextlib.nullcontext():
        import pytest_gputrain.worker.run  # noqa: F401

        if case.method != "script":
            # The first optimizer imports this module, which takes most of the time of a small case.
            importlib.import_module("torch._dynamo")
        if case.parallel == "fsdp":
            importlib.import_module("torch.distributed.fsdp")
        if case.code:
            return
        _load_users_of_gpu(case)
        from pytest_gputrain.worker.checks import CheckFailed
        from pytest_gputrain.worker.zoo.completed import architecture_of
        from pytest_gputrain.worker.zoo.headed import model_class

        with contextlib.suppress(CheckFailed):  # The build meets the same error again, and reports it.
            architecture = architecture_of(case.model)
            for part in architecture.parts.values():
                if architecture.family == "language" and part.library == "transformers":
                    model_class(part)
                elif part.library != "own":
                    getattr(importlib.import_module(part.library), part.model_class)


def _load_users_of_gpu(case: Case) -> None:
    """Import the case's libraries that use a GPU at import."""
    if case.method in ADAPTING or case.optimizer in EIGHT_BIT:
        _load_bitsandbytes()  # peft imports bitsandbytes, too, if it is installed.
    if case.method in ADAPTING:
        importlib.import_module("peft")
        with contextlib.suppress(ImportError, AttributeError):  # Older releases of transformers have no such table.
            # peft asks for this table for each model. transformers makes the table when it is asked for the first time.
            importlib.import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("")
    if case.optimizer == "adafactor":
        importlib.import_module("transformers.optimization")
    if case.parallel.startswith("zero"):
        importlib.import_module("deepspeed")


def track_for_forks() -> None:
    """Replace the operators for emulated GPUs of forked processes. This takes half a second, which every fork then saves."""
    from pytest_gputrain.worker.emulated import FOLLOWED

    FOLLOWED.enable()


@contextlib.contextmanager
def _asking_no_driver() -> Iterator[None]:
    """Provide a context in which NVML answers bitsandbytes at import, because torch would use the GPU to answer."""
    import pynvml
    import torch

    def capability(device: Any = None) -> tuple[int, ...]:
        return tuple(pynvml.nvmlDeviceGetCudaComputeCapability(pynvml.nvmlDeviceGetHandleByIndex(0)))

    pynvml.nvmlInit()
    try:
        with mock.patch.object(torch.cuda, "get_device_capability", capability):
            yield
    finally:
        pynvml.nvmlShutdown()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Provide a context without garbage collection, which takes a tenth of the time of imports and frees nothing."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def _load_bitsandbytes() -> None:
    """Import bitsandbytes, if it is installed, without a compiler.

    While it is imported, it hands the kernels that it has for processors without their own to `torch.compile`, which loads
    for two seconds, and compiles in the first step if there is a compiler. GPUs have kernels of their own.
    """
    import torch

    with mock.patch.object(torch, "compile", _as_it_is), contextlib.suppress(ImportError):
        importlib.import_module("bitsandbytes")


def _as_it_is(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    return _as_it_is if function is None else function
