"""Runs ``gputrain emulate --install`` and what belongs to it: a CUDA build of torch that only emulated GPUs use."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from pytest_gputrain.hardware.emulation import install, installed, libraries
from pytest_gputrain.utils import console
from pytest_gputrain.utils.errors import CannotEmulate
from pytest_gputrain.utils.units import format_bytes

_ACTIONS: Final = ("install", "verify", "list", "uninstall")
_OF_INSTALL: Final = ("from", "index_url", "hash")


def add_options(emulate: argparse.ArgumentParser) -> None:
    """Add the options for installed builds to ``gputrain emulate``."""
    group = emulate.add_argument_group(
        "a CUDA build of torch beside one for the CPU or ROCm, for emulated GPUs alone; instead of --gpu and a command"
    )
    actions = group.add_mutually_exclusive_group()
    actions.add_argument(
        "--install",
        action="store_true",
        help="download PyPI's CUDA build of the installed torch's version into a folder of your cache (about 0.8 GB, "
        "2 GB on disk); your environment stays as it is",
    )
    actions.add_argument("--verify", action="store_true", help="read all files of it, and compare them with their hashes")
    actions.add_argument("--list", action="store_true", help="list all of your cache")
    actions.add_argument("--uninstall", action="store_true", help="remove all of your cache that no process uses")
    group.add_argument("--from", type=Path, metavar="DIR", help="with --install: take the wheels from this folder")
    group.add_argument("--index-url", default="", metavar="URL", help="with --install: download from this mirror of PyPI")
    group.add_argument(
        "--hash",
        action="append",
        type=_sha256,
        default=[],
        metavar="SHA256",
        help="with --install: the hash of a wheel that this release of pytest-gputrain does not know; once for each wheel",
    )


def _sha256(text: str) -> str:
    digest = text.removeprefix("sha256:").lower()
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise argparse.ArgumentTypeError(f"{text!r} is not a sha256, which has 64 hexadecimal digits")
    return digest


def is_asked(options: argparse.Namespace) -> bool:
    """Tell whether one of these options is given."""
    return any(getattr(options, name) for name in (*_ACTIONS, *_OF_INSTALL))


def main(options: argparse.Namespace, program: Sequence[str]) -> int:
    """Install, list, verify or remove CUDA builds of torch. Return 0, 1 for a build that is damaged or in use, or 2 if the
    options or this machine do not allow it."""
    action = next((name for name in _ACTIONS if getattr(options, name)), None)
    if action != "install" and any(getattr(options, name) for name in _OF_INSTALL):
        console.say("--from, --index-url and --hash belong to gputrain emulate --install")
        return 2
    of_a_program = program or options.gpu is not None or options.gpus != 1
    if of_a_program or options.json or options.html or options.must_fit:
        console.say(f"--{action} runs no program; leave out the command and its options such as --gpu, and run it later")
        return 2
    try:
        if action == "install":
            folder = getattr(options, "from")
            source = install.Source(folder and folder.absolute(), options.index_url, tuple(options.hash))
            return _install(source)
        if action == "uninstall":
            return 0 if install.uninstall(console.say) else 1
        return _verify() if action == "verify" else _list()
    except CannotEmulate as error:
        console.say(error)
        return 2


def _install(source: install.Source) -> int:
    libraries.check_machine()
    if source.folder is not None and source.address:
        console.say("--from and --index-url name two places for the wheels; give one of them")
        return 2
    made = install.install(source, console.say)
    folder = libraries.torch_folder()
    if made is None:
        console.say(f"torch in {folder} is a CUDA build, so nothing was installed")
        return 0
    console.say(f"emulated GPUs use {_described(made)}")
    if packages := libraries.compiled_for_cpu(folder.parent):
        console.say(
            f"{' and '.join(packages)} in {folder.parent} {'was' if len(packages) == 1 else 'were'} compiled for the CPU: "
            "an emulated GPU runs none of their own operators"
        )
    return 0


def _verify() -> int:
    status = 0
    for made in installed.builds():
        damage = made.damage(digests=True)
        status |= bool(damage)
        console.say(
            f"{made.folder} is damaged: {damage}; mend it with: {installed.MEND}" if damage else f"{made.folder} is whole"
        )
    return status


def _list() -> int:
    for made in installed.builds():
        console.put(_described(made))
    if not any(True for _ in installed.builds()):
        console.say(f"there is no CUDA build of torch in {installed.builds_folder()}")
    return 0


def _described(made: installed.Build) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in made.manifest.versions.items())
    python = made.manifest.python.strip(".").removesuffix(".so")
    return f"{made.folder}: {versions} for {python}, {format_bytes(made.manifest.bytes)}, {made.origin}"
