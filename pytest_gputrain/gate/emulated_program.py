"""Judges whether a program fits the GPUs that `gputrain emulate` ran it on."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator, Sequence

from pytest_gputrain.records.emulation import ESTIMATED, DeviceUse, EmulatedProcess, ProgramFit, Refused
from pytest_gputrain.utils.units import format_bytes


def judge(
    command: Sequence[str],
    status: int,
    memory_bytes: int,
    processes: Sequence[EmulatedProcess],
    use: Sequence[DeviceUse],
) -> ProgramFit:
    """Return whether a program fits the GPU, from the memory that its processes took.

    A request that was refused decides, whether or not the program went on after it. What is not known of the program, or
    did not happen because it ended early, makes the answer incomplete.

    Args:
        status: the program's exit status.
        memory_bytes: of each GPU.
    """
    went_on = "" if status else "; the program went on after the error"
    refused = [one for process in processes for device in process.devices for one in device.refused]
    if refused:
        largest = max(refused, key=_missing)
        missing, sentence = _missing(largest), _refusal(largest) + went_on
        if within := _within_error(missing, processes, use):
            return ProgramFit(verdict="incomplete", headroom_bytes=-missing, sentence=f"{sentence}; {within}")
        return ProgramFit(verdict="does not fit", headroom_bytes=-missing, sentence=sentence)
    if beside := max((one.missing_beside_torch for one in use), default=0):
        sentence = f"at least {format_bytes(beside)} are missing for a request beside torch's allocator{went_on}"
        return ProgramFit(verdict="does not fit", headroom_bytes=-beside, sentence=sentence)
    if not use:
        sentence = (
            f"{shlex.join(command)} never used the GPU, so there are no figures; perhaps an option chooses its device, or "
            "it ended before"
        )
        return ProgramFit(verdict="incomplete", headroom_bytes=None, sentence=sentence)
    by_gpu: defaultdict[int, list[int]] = defaultdict(list)
    for one in use:
        by_gpu[one.gpu].append(one.peak_bytes)
    fullest = max(by_gpu.values(), key=sum)
    headroom = memory_bytes - sum(fullest)
    of = f"of {format_bytes(memory_bytes)}" + (" on the fullest GPU" if len(by_gpu) > 1 else "")
    if why := [*_unknown(status, processes, use, headroom)]:
        left = f"at most {format_bytes(max(headroom, 0))} {of} are left"
        return ProgramFit(verdict="incomplete", headroom_bytes=headroom, sentence=f"{left}, and {'; '.join(why)}")
    if headroom < 0:
        sentence = (
            f"{len(fullest)} processes used one GPU, at most {format_bytes(sum(fullest))} {of} together; whether their "
            "peaks come at one time is not known"
        )
        return ProgramFit(verdict="incomplete", headroom_bytes=headroom, sentence=sentence)
    return ProgramFit(verdict="fits", headroom_bytes=headroom, sentence=f"{format_bytes(headroom)} {of} are left")


def _missing(refused: Refused) -> int:
    # The result is zero if enough memory was free, but only in pieces that were too small.
    return max(refused.bytes - refused.free, 0)


def _refusal(refused: Refused) -> str:
    asked = f"the {format_bytes(refused.bytes)} of {refused.where or 'a place without a Python line'}"
    if missing := _missing(refused):
        return f"at least {format_bytes(missing)} are missing for {asked}"
    return f"the memory that is free lies in pieces, none for {asked}"


def _unknown(status: int, processes: Sequence[EmulatedProcess], use: Sequence[DeviceUse], headroom: int) -> Iterator[str]:
    """Yield what is unknown about the program's memory, each as the end of a sentence."""
    if status:
        yield f"what comes after is not known: the program ended with exit status {status}"
    recorded = {process.process for process in processes}
    if unrecorded := sorted({str(one.process) for one in use if one.process not in recorded}):
        yield (
            f"whether a request was refused is not known of process {', '.join(unrecorded)}, which ended without Python's "
            "own end, or ran without PYTHONPATH"
        )
    if unknown := dict.fromkeys(what for process in processes for what in process.unknown):
        yield f"not counted: {', '.join(unknown)}"
    if headroom >= 0 and (within := _within_error(headroom, processes, use)):
        yield within


def _within_error(margin: int, processes: Sequence[EmulatedProcess], use: Sequence[DeviceUse]) -> str:
    """Return the sentence on workspaces if their error, of all processes of a GPU, is larger than ``margin`` bytes."""
    errors = {process.process: process.estimated_bytes for process in processes}
    by_gpu: defaultdict[int, int] = defaultdict(int)
    for one in use:
        by_gpu[one.gpu] += errors.get(one.process, 0)
    error = max(by_gpu.values(), default=0)
    return f"{ESTIMATED} ({format_bytes(error)}): whether it fits is within that error" if margin < error else ""
