"""Spreads a case's training over processes: one module for each engine."""

from __future__ import annotations

from typing import Final

from pytest_gputrain.worker.parallel.data_parallel import DataParallel
from pytest_gputrain.worker.parallel.engine import Engine, EngineOptions
from pytest_gputrain.worker.parallel.fully_sharded import FullySharded
from pytest_gputrain.worker.parallel.parameter_server import ParameterServer
from pytest_gputrain.worker.parallel.single import Single
from pytest_gputrain.worker.parallel.zero import Zero

__all__ = ["ENGINES", "NEEDS_GROUP", "Engine", "EngineOptions"]

ENGINES: Final[dict[str, type[Engine]]] = {
    "single": Single,
    "ddp": DataParallel,
    "fsdp": FullySharded,
    "zero0": Zero,
    "zero1": Zero,
    "zero2": Zero,
    "zero3": Zero,
    "ps": ParameterServer,
}
"""The engines by ``Case.parallel``."""

NEEDS_GROUP: Final = frozenset(ENGINES) - {"single"}
"""Engines that want torch.distributed ready even for one process."""
