"""Defines what an option is, and the ways in which the text of one is parsed.

pytest imports this module in every project, so what a parser needs of the records is imported when a text is parsed.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, get_args

from pytest_gputrain.hardware.catalog import MARKERS

_LONGEST_NAME: Final = 255
"""The most bytes that a file's name may have on common file systems."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option: ``--gpu-name``, unless it is `ini_only`, and ``gpu_name`` in the ini file."""

    name: str = ""
    field: str = ""
    """The field of the settings that holds its value."""
    meaning: str
    parse: Callable[[str], Any] = str
    default: str = ""
    """The default as one would type it; empty for none."""
    default_meaning: str = ""
    """A description of the default, where `default` itself does not say what happens."""
    absent: Any = None
    """The value if nobody gives one and there is no default."""
    metavar: str = ""
    """How its value is written; empty for a switch, which is on or off: of ``--gpu-name`` and ``--no-gpu-name`` the last
    counts."""
    repeated: bool = False
    """Whether it may be given several times; in the ini file each value is on its own line."""
    ini_only: bool = False
    """Whether the command line has no flag for it."""
    output: bool = False
    """Whether it names a file for a run to write."""
    page: str = ""
    """The page of the documentation that explains it."""

    @property
    def flag(self) -> str:
        return f"--gpu-{self.name}"

    @property
    def ini(self) -> str:
        return "gpu_" + self.name.replace("-", "_")

    @property
    def switch(self) -> bool:
        return not self.metavar

    @property
    def help(self) -> str:
        default = self.default_meaning or self.default
        return f"{self.meaning} (default: {default})" if default else self.meaning

    def refused_flag(self, value: str | None) -> str:
        """Return the sentence that refuses the flag of an option that is `ini_only`, with the line to write instead.

        Args:
            value: as it was typed; None or empty if there was none.
        """
        value = "true" if self.switch else value or self.metavar
        override = shlex.quote(f"{self.ini}={value}")
        return f"{self.flag} is set in the ini file: {self.ini} = {value}, or -o {override} for one run"


def option(metavar: str, meaning: str, *, name: str = "", **more: Any) -> Any:
    """Declare a field of the settings as an option of the same name, or of another; ``more`` has fields of `Option`."""
    return field(metadata={"option": Option(name=name, metavar=metavar, meaning=meaning, **more)})


def switch(meaning: str, **more: Any) -> Any:
    """Declare a field as an option that is on or off, as `option` does."""
    return option("", meaning, **{"parse": parse_switch, "absent": False, **more})


def choice(words: Any, meaning: str, **more: Any) -> Any:
    """Declare a field as an option that takes one of the words of a ``Literal``, as `option` does."""
    return option("|".join(get_args(words)), meaning, parse=_one_of(get_args(words)), **more)


def options_of(settings: type) -> tuple[Option, ...]:
    """Return the options that the fields of the settings declare, in their order."""
    declared = [(field.name, field.metadata["option"]) for field in fields(settings) if field.metadata]
    return tuple(replace(option, field=name, name=option.name or name.replace("_", "-")) for name, option in declared)


def _one_of(words: tuple[str, ...]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(f"{text!r} is none of {', '.join(words)}")
        return text

    return parse


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    def parse(text: str) -> int:
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else -1
        if number < least or (most is not None and number > most):
            raise ValueError(f"{text!r} is not a whole number from {least} {'on' if most is None else f'to {most}'}")
        return number

    return parse


def parse_switch(text: str) -> bool:
    values = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if text.lower() not in values:
        raise ValueError(f"{text!r} is neither true nor false")
    return values[text.lower()]


def parse_strict(text: str) -> bool | None:
    if text.lower() == "auto":
        return None
    try:
        return parse_switch(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither true, false nor auto") from None


def parse_endpoint(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+(:[0-9]{1,5})?", text):
        raise ValueError(f"{text!r} is not a host, or a host and a port, as node1 or node1:29400")
    return text


def parse_path(text: str) -> Path:
    longest = max(len(os.fsencode(part)) for part in ("", *text.split("/")))
    if "\0" in text or longest > _LONGEST_NAME:
        raise ValueError(
            f"{text[:40]!r}{'...' if len(text) > 40 else ''} is not a path: a name in it is too long, or has a zero byte"
        )
    return Path(text)


def parse_memory_tolerance(text: str) -> object:
    # A project without cases needs no records, whose import takes time.
    from pytest_gputrain.records.tolerance import parse_memory_tolerance

    return parse_memory_tolerance(text)


def parse_count_tolerances(text: str) -> object:
    from pytest_gputrain.records.tolerance import parse_count_tolerances

    return parse_count_tolerances(text)


def parse_axes(text: str) -> object:
    from pytest_gputrain.cases.sweep import parse_axes

    return parse_axes(text, MARKERS)


def parse_platform(text: str) -> str:
    from pytest_gputrain.utils.suggest import did_you_mean  # Only a misspelt word needs this module.

    if text not in MARKERS:
        raise ValueError(f"{text!r} is unknown{did_you_mean(text, MARKERS)}; known: {', '.join(MARKERS)}")
    return text


def parse_executor(text: str) -> str | None:
    """Return the scheduler that ``--gpu-executor`` names; None for this machine."""
    name = _one_of(("local", "slurm", "ray"))(text)
    return None if name == "local" else name


def parse_site_arguments(text: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the platform and the arguments of each line of text. The platform is empty for a line that holds for all."""
    arguments = []
    for line in filter(None, map(str.strip, text.splitlines())):
        platform, colon, rest = line.partition(":")
        if platform.startswith("-") or "=" in platform:
            platform, rest = "", line
        elif not colon:
            raise ValueError(f"{line!r} is neither arguments nor a platform with some, as 'h100: --partition=gpu'")
        try:
            words = tuple(shlex.split(rest))
        except ValueError as error:
            raise ValueError(f"{line!r} cannot be split into arguments: {error}") from None
        arguments.append((parse_platform(platform.strip()) if platform.strip() else "", words))
    return tuple(arguments)


def path_or(*words: str) -> Callable[[str], Path | str]:
    return lambda text: text if text in words else parse_path(text)


def parse_ids(text: str) -> tuple[str, ...]:
    ids = tuple(part.strip() for part in text.split(",") if part.strip())
    if not ids or len(set(ids)) != len(ids):
        raise ValueError(f"{text!r} is not a list of GPU indices or UUIDs, each once, separated by commas")
    return ids
