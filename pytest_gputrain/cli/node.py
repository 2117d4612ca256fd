"""Runs the command ``gputrain node``, which starts processes here for cases that pytest spreads over several nodes."""

from __future__ import annotations

import argparse
import contextlib
import socket
from pathlib import Path
from typing import Any

from pytest_gputrain.utils import console
from pytest_gputrain.utils.sanitize import shown


def add_to(commands: Any) -> None:
    node = commands.add_parser("node", help="run the processes of this machine for cases of several nodes, until Ctrl-C")
    node.add_argument("shared", type=Path, metavar="DIR", help="the folder that all nodes share (gpu_shared of pytest)")
    node.add_argument(
        "--host",
        default=socket.gethostname(),
        metavar="HOST",
        help="the name or address of this node for the other nodes (default: its name)",
    )


def main(options: argparse.Namespace) -> int:
    """Train this node's part of cases until Ctrl-C. Return 0, or 2 if the folder cannot be used."""
    from pytest_gputrain.execution.launch.node_service import serve

    try:
        with contextlib.suppress(KeyboardInterrupt):
            serve(options.shared.absolute(), options.host, lambda line: console.put(f"gputrain: {shown(line)}"))
    except OSError as error:
        console.say(f"{options.shared} cannot be used as the folder that all nodes share: {error.strerror}")
        return 2
    return 0
