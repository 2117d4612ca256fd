"""Defines the records that pytest and the agents of several nodes exchange as files in the case's folder, which all share.

case.json        the task
nodes.json       Nodes: over how many; written last
word.json        Word: rewritten every second by pytest; an agent that hears nothing new for long ends
endpoint.json    Endpoint: where the agents meet, by that of the first seat
node{seat}/      made by who takes the seat: joined.json, output.txt, left.json
rank{n}/         as of a case on one node; and exit.json, by the agent, of a rank that did not end well
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import Struct

NODES, WORD, ENDPOINT, EXIT = "nodes.json", "word.json", "endpoint.json", "exit.json"
JOINED, LEFT, OUTPUT = "joined.json", "left.json", "output.txt"

WORD_EVERY_SECONDS: Final = 1.0
SILENCE_SECONDS: Final = 30.0
"""Without a new word for so long, pytest is taken for dead."""


class Nodes(Struct, frozen=True, kw_only=True):
    """How a case is spread."""

    count: int
    processes: int
    """Of all nodes together."""
    join_seconds: float
    """From the start until all nodes must have met."""

    def processes_of(self, seat: int) -> int:
        """Return the number of processes of one node; the first ones have one more where they cannot all have as many."""
        return self.processes // self.count + (seat < self.processes % self.count)


class Word(Struct, frozen=True, kw_only=True):
    """What pytest wants of the agents; the number tells one word from the next."""

    number: int
    wish: Literal["train", "stacks", "over"]


class Endpoint(Struct, frozen=True, kw_only=True):
    """Where torch's rendezvous is."""

    host: str
    port: int


class Joined(Struct, frozen=True, kw_only=True):
    """An agent has started on its node."""

    host: str


class Left(Struct, frozen=True, kw_only=True):
    """An agent has ended, and all that it started."""

    failure: str = ""
    """Sentence, where it ended neither because of a rank nor because it was told to."""


class RankExit(Struct, frozen=True, kw_only=True):
    """How a rank ended."""

    exit_code: int
    """Negative for a signal."""
    killed_for_memory: bool
    """Whether the kernel's OOM killer did it."""


_Record = TypeVar("_Record", bound=Struct)


def node_folder(folder: Path, seat: int) -> Path:
    """Return what belongs to one node of the case in ``folder``."""
    return folder / f"node{seat}"


def write_record(path: Path, what: Any) -> None:
    """Write a record, whole or not at all.

    Raises:
        FileNotFoundError: the folder is gone, and the case with it.
    """
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(msgspec.json.encode(what))
    os.replace(part, path)


def read_record(path: Path, kind: type[_Record]) -> _Record | None:
    """Read the record in ``path``; None while there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
