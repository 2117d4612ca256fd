"""What a case of the zoo imports, imported at once."""

from __future__ import annotations

import importlib

from pytest_gputrain.architectures import architectures
from pytest_gputrain.records import Case


def load(case: Case) -> None:
    """Import the modules that training ``case`` takes; nothing is computed.

    Libraries import their parts when they are first used, and some make tensors then, which are none of the training's.

    Raises:
        ImportError: a library is missing or broken.
    """
    import pytest_gputrain.worker.run  # noqa: F401

    if case.code:
        return
    for part in architectures()[case.model].parts.values():
        if part.library != "own":
            getattr(importlib.import_module(part.library), part.model_class)
    if case.method in ("lora", "qlora"):
        importlib.import_module("peft")
    if case.parallel.startswith("zero"):
        importlib.import_module("deepspeed")
