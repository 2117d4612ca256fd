"""Defines the records that pytest and the agents of several nodes exchange as files in the case's shared folder.

case.json        the task
nodes.json       Nodes: the nodes of the case; written last
command.json     Command: rewritten every second by pytest; an agent that gets no new one for long ends
endpoint.json    Endpoint: the address where the agents meet, by that of the first node
node{n}/         made by the machine that takes this node of the case: joined.json, output.txt, left.json
rank{n}/         as of a case on one node; and exit.json, by the agent, of a rank that did not end well
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import Struct

from pytest_gputrain.utils.json_text import encoded
from pytest_gputrain.utils.reading import UNREADABLE, read_message

NODES, COMMAND, ENDPOINT, EXIT = "nodes.json", "command.json", "endpoint.json", "exit.json"
JOINED, LEFT, OUTPUT = "joined.json", "left.json", "output.txt"

COMMAND_EVERY_SECONDS: Final = 1.0
SILENCE_SECONDS: Final = 30.0
"""The time without a new command after which pytest counts as dead."""


class Nodes(Struct, frozen=True, kw_only=True):
    """The nodes and processes of a case."""

    count: int
    processes: int
    """The processes of all nodes together."""
    join_seconds: float
    """The time from the start until all nodes must have met."""

    def processes_of(self, node: int) -> int:
        """Return the number of processes of one node. If it does not divide evenly, the first nodes have one more."""
        return self.processes // self.count + (node < self.processes % self.count)


class Command(Struct, frozen=True, kw_only=True):
    """A command of pytest to the agents. The number distinguishes it from the one before."""

    number: int
    action: Literal["train", "stacks", "over"]


class Endpoint(Struct, frozen=True, kw_only=True):
    """The address of torch's rendezvous."""

    host: str
    port: int


class Joined(Struct, frozen=True, kw_only=True):
    """A record that an agent has started on its node."""

    host: str


class Left(Struct, frozen=True, kw_only=True):
    """A record that an agent has ended, and all processes that it started."""

    failure: str = ""
    """A sentence, if it ended for another reason than a rank or a command."""


class RankExit(Struct, frozen=True, kw_only=True):
    """A record of how the process of a rank ended."""

    exit_code: int
    """Negative for a signal."""
    killed_for_memory: bool
    """Whether the kernel's OOM killer did it."""


_Record = TypeVar("_Record", bound=Struct)


def node_folder(folder: Path, node: int) -> Path:
    """Return the folder of one node of the case in ``folder``."""
    return folder / f"node{node}"


def write_record(path: Path, what: Any) -> None:
    """Write a record completely, or not at all.

    Raises:
        FileNotFoundError: the folder is gone, and the case with it.
    """
    part = path.with_name(f"{path.name}.part")
    part.write_bytes(encoded(what))
    os.replace(part, path)


class BadRecord(Exception):
    """A file in the case's folder is not one that this package writes there. The message is a sentence."""


def read_record(path: Path, kind: type[_Record]) -> _Record | None:
    """Return the record in ``path``; None if there is none yet.

    Raises:
        BadRecord: it cannot be read.
    """
    try:
        return msgspec.json.decode(read_message(path), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, *UNREADABLE) as error:
        raise BadRecord(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from None
