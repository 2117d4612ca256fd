"""Identifies cases: the suite, the key in files, and the fields that tell two cases apart."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec

from pytest_gputrain.records import Case, Scale, Task


def differences(case: Case, other: Case) -> str:
    """Name the fields of identity in which two cases differ: ``batch_size 2 -> 4, optimizer adamw -> adamw-fused``."""
    before, after = case.identity(), other.identity()
    names = [name for name in Case.__struct_fields__ if before.get(name) != after.get(name)]
    return ", ".join(f"{name} {getattr(case, name)} -> {getattr(other, name)}" for name in names)


def same_id(suite: str, first: Case, second: Case) -> str:
    """Return the sentence for two different cases with one id."""
    return (
        f"two different cases of the suite {suite} have the id {second} ({differences(first, second)}): they would share "
        "one baseline; vary the difference in a grid, which puts it into the ids, or name one by model=..."
    )


def key_of(case: Case, scale: Scale) -> str:
    """Return the name of a case in its baseline file."""
    return f"{case}@tiny" if scale == "tiny" else str(case)


def identity_of(task: Task, inline: bool = False) -> bytes:
    """Return a digest of a task. Tasks that measure something else, or in another environment, have another digest."""
    case = task.case
    steps = case.steps, case.warmup, case.epoch
    asked = (case.identity(), *steps, task.scale, task.curve, task.variables, task.growth_bytes, inline)
    return hashlib.sha256(msgspec.json.encode(asked)).digest()


def suite_of(path: Path) -> str:
    """Return the name of a test file's suite: ``test_llm_finetuning.py`` holds ``llm_finetuning``."""
    return path.stem.removeprefix("test_")
