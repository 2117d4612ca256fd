"""Decides by platforms, ``-m`` and the number of GPUs whether a test that was selected may run on this machine. Pure."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection
from typing import Final, NamedTuple

from pytest_gputrain.cases.validation import problem
from pytest_gputrain.execution.settings import Settings
from pytest_gputrain.hardware.catalog import CPU, MARKERS
from pytest_gputrain.records import Case, Host
from pytest_gputrain.records.tolerance import Terms
from pytest_gputrain.utils.errors import BadCase, CannotRun, OtherPlatform
from pytest_gputrain.utils.suggest import did_you_mean

_ALL: Final = frozenset(MARKERS)


class ExpectedCase(NamedTuple):
    """A case that a test of this run will ask for."""

    suite: str
    case: Case
    markers: frozenset[str]
    expression: str
    """The expression of ``-m``."""
    terms: Terms
    """The terms of its test, for a fleet; none for others, which have no use for them before the test runs."""


def platforms_of(declared: object) -> tuple[str, ...]:
    """Return the markers that a case with these ``platforms`` carries.

    Its own and ``cpu``. A case without any is declared for all. So is, in effect, one with a misspelt platform (or with no
    tuple of them): no ``-m`` then passes it over, and it fails there with a sentence instead of silently never running.
    """
    if not declared or not isinstance(declared, tuple) or any(platform not in MARKERS for platform in declared):
        return MARKERS
    return tuple(dict.fromkeys((*declared, CPU)))


def platforms_named(expression: str) -> list[str]:
    """Return the platforms that a ``-m`` expression asks for by name."""
    words = set(_names_in(expression))
    # An expression may also ask for markers that are no platforms. It names a platform if it holds without them or with all
    # of them.
    others = words - _ALL
    return [m for m in MARKERS if m in words and (_holds(expression, {m}) or _holds(expression, {m} | others))]


def platforms_missed(expression: str, markers: Collection[str]) -> list[str]:
    """Return the platforms whose marker a test lacks to be selected by the ``-m`` expression; none if it is selected, or has
    such a marker."""
    if _ALL.intersection(markers) or _holds(expression, markers):
        return []
    return [platform for platform in MARKERS if _holds(expression, {*markers, platform})]


def platform_meant(expression: str) -> str:
    """Return `` (did you mean 'h100'?)`` for the first misspelt platform in a ``-m`` expression; empty if there is none."""
    return next(filter(None, (did_you_mean(word, MARKERS) for word in _names_in(expression) if word not in _ALL)), "")


def _names_in(expression: str) -> list[str]:
    return re.findall(r"\w+", expression)


def why_skipped(markers: Collection[str], expression: str, platform: str, gpus: int) -> str | None:
    """Say why a test must not run on a machine of ``platform``, None if it may.

    ``-m h100`` selects tests by what they are declared for. A machine that is no H100 satisfies the expression only if it
    still holds when the machine's own platform is the only one the test carries.

    Args:
        markers: names of all markers of the test.
        expression: of ``-m``; empty for none.
        gpus: devices the test's case needs.
    """
    declared = [marker for marker in MARKERS if marker in markers]
    if not declared:
        return None
    everywhere = len(declared) == len(MARKERS)
    here = platform in declared or (everywhere and platform not in _ALL)
    if here and (not expression or _holds(expression, (set(markers) - _ALL) | {platform})):
        return None
    wanted = [marker for marker in declared if expression and _holds(expression, (set(markers) - _ALL) | {marker})]
    gpu_markers = [marker for marker in (wanted or declared) if marker != CPU]
    needs = " or ".join(f"{marker} x{gpus}" for marker in gpu_markers) or CPU
    return f"needs {needs}, found {platform}"


def refuse_unfit(
    case: Case, markers: Collection[str], expression: str, host: Host, settings: Settings, *, scaling: bool = False
) -> None:
    """Refuse a case that must not, or cannot, run on a machine.

    Args:
        markers, expression: as of `why_skipped`, for the markers of the test without those of the case.
        host: the machine, or under ``--gpu-emulate`` the one that is emulated.
        scaling: the test wants to know how the case scales.

    Raises:
        BadCase: the case names something unknown.
        CannotRun: the machine is not what the test was selected for, or lacks the devices.
    """
    if wrong := problem(case, MARKERS):
        raise BadCase(wrong)
    declared = platforms_of(case.platforms) if case.platforms else ()
    if reason := why_skipped({*markers, *declared}, expression, host.platform, case.gpus):
        raise OtherPlatform(f"not declared for {host.platform}, which this run emulates" if settings.emulate else reason)
    lacking = what_lacks(
        case, gpus=host.gpus, most_nodes=settings.nodes, most_processes=settings.processes, all_of_them=scaling
    )
    if lacking:
        raise CannotRun(lacking)
    if case.method == "script":
        _refuse_script(case, host, settings)


def _refuse_script(case: Case, host: Host, settings: Settings) -> None:
    """Raise an error if this run cannot measure the script. The arguments and errors are those of `refuse_unfit`."""
    if settings.find_batch or settings.loss_steps is not None:
        raise BadCase(f"{case} is a script, which --gpu-find-batch and --gpu-loss cannot change; deselect its test")
    if settings.isolation == "inline":
        raise BadCase(f"{case} is a script, which needs a process of its own; leave out --gpu-isolation=inline")
    if not host.gpus:
        raise BadCase(
            f"{case} was not measured: a script's memory is known from torch's CUDA allocator, and this run has no GPU; add "
            "--gpu-emulate --gpu-platform=h100, which needs torch's CUDA build but no GPU, or run it on a machine with one"
        )


def what_lacks(case: Case, *, gpus: int, most_nodes: int, most_processes: int, all_of_them: bool) -> str | None:
    """Say why a case cannot run on machines of a platform that it is declared for, None if it can.

    Args:
        gpus: of a machine; 0 for a CPU.
        most_processes: of a case on a CPU.
        all_of_them: whether fewer processes than the case declares would not do.
    """
    if gpus and case.gpus > gpus:
        lack = f"needs {case.gpus} GPUs, found {gpus}"
        if case.gpus % gpus:
            return f"{lack}; a case takes whole nodes, so no number of nodes fits"
        if case.servers:
            return f"{lack}; a case with parameter servers stays on one node"
        nodes = case.gpus // gpus
        return f"{lack}; -o gpu_nodes={nodes} takes those of {nodes} nodes" if nodes > most_nodes else None
    if gpus:
        return None
    if all_of_them and most_processes < case.gpus:
        # With fewer processes the engine would run, but the scaling efficiency would not be that of the case.
        return f"needs {case.gpus} processes; -o gpu_processes={case.gpus} runs them on a CPU"
    if case.gpus + case.servers > 1 and most_processes == 1:
        few = "two workers and two servers at most" if case.servers else "two of them"
        return f"needs {case.gpus + case.servers} processes; -o gpu_processes=2 runs {few} on a CPU"
    if case.parallel.startswith("zero") and case.precision == "fp16-amp":
        return "needs a GPU: DeepSpeed's fp16 refuses a CPU"
    return None


def _holds(expression: str, names: Collection[str]) -> bool:
    """Evaluate a ``-m`` expression over plain marker names. pytest has refused malformed ones before; those with names that
    are no Python identifiers, or with arguments, count as satisfied: they are about something else than platforms."""
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError):  # Before Python 3.12 a null character raises ValueError.
        return True
    return _value(tree, names) is not False


def _value(node: ast.expr, names: Collection[str]) -> bool | None:
    """Evaluate an expression in three-valued logic: None stands for what cannot be known, and its negation is None."""
    match node:
        case ast.BoolOp():
            values = [_value(value, names) for value in node.values]
            decisive = isinstance(node.op, ast.Or)
            if decisive in values:
                return decisive
            return None if None in values else not decisive
        case ast.UnaryOp(op=ast.Not()):
            value = _value(node.operand, names)
            return None if value is None else not value
        case ast.Name():
            return node.id in names
        case _:
            return None
