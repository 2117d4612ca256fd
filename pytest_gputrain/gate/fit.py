"""Judges whether a case fits a GPU, how sure that is, and up to which batch. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from pytest_gputrain.hardware.emulation.boards import CONTEXT_BYTES
from pytest_gputrain.records import Case, EmulatedRun
from pytest_gputrain.records.fit import Fit

ERROR: Final = 0.04
"""The error of memory. Published peaks of cases on one GPU lie within 3.8 % of emulated ones
(docs/how-true.md)."""

_GUESSES: Final = 5
"""Batches that are guessed from a line, before the search goes on by halves."""

At = Callable[[int], EmulatedRun]
"""Gives the figures of a case on a GPU of this much memory, 0 for any amount."""


class Judgement(NamedTuple):
    """Whether a case fits a GPU, and how much of its memory the case takes."""

    fit: Fit
    needed_bytes: int | None
    """The memory that nvidia-smi would show, on a GPU without a limit if the case does not fit. None if it is not known."""


def judge(case: Case, memory_bytes: int, at: At) -> Judgement:
    """Return whether the case fits the GPU, and whether an error of its figures would change that.

    What the case takes without limit tells it for most. Near the capacity the allocator gives cached memory back, so there
    the case is tried with the memory of the GPU, and with a little more or less.
    """
    free = at(0)
    if _is_cut_short(free):
        return Judgement("does-not-fit", None)
    found = _judged(case, memory_bytes, free, at)
    is_incomplete = found.fit == "fits" and free.not_counted
    return found._replace(fit="incomplete") if is_incomplete else found


def _judged(case: Case, memory_bytes: int, free: EmulatedRun, at: At) -> Judgement:
    needed, least = needed_bytes(free, case), _least_bytes(free, case)
    surely = tight(memory_bytes, free.estimated_bytes)
    perhaps = max(round(memory_bytes * (1 + ERROR)), memory_bytes + free.estimated_bytes)
    if needed <= surely:
        return Judgement("fits", needed)
    if least > perhaps:
        return Judgement("does-not-fit", needed)
    on_gpu = free if needed <= memory_bytes else at(memory_bytes)
    if on_gpu is free or on_gpu.fits:
        sure = at(surely).fits
        return Judgement("fits" if sure else "within-error", needed_bytes(on_gpu, case))
    return Judgement("within-error" if at(perhaps).fits else "does-not-fit", needed)


def _is_cut_short(free: EmulatedRun) -> bool:
    """Tell whether a case without a limit of memory ended early, because the emulated GPU has no more addresses.

    Its figures are only those of what came before.
    """
    return not free.fits


def needed_bytes(figures: EmulatedRun, case: Case) -> int:
    """Return how much memory of a GPU a case needs. Building the model counts, unless programs load the model in parts."""
    return max(figures.peak_reserved_bytes, _highest(figures, case)) + CONTEXT_BYTES


def _least_bytes(figures: EmulatedRun, case: Case) -> int:
    """Return how much memory a case needs if the allocator gives back all memory that it caches."""
    return max(figures.peak_allocated_bytes, _highest(figures, case)) + CONTEXT_BYTES


def _highest(figures: EmulatedRun, case: Case) -> int:
    left_out = {"checkpoint_host", *(("build",) if loads_in_parts(case) else ())}
    return max((peak for phase, peak in figures.phase_peak_bytes.items() if phase not in left_out), default=0)


def tight(memory_bytes: int, estimated_bytes: int = 0) -> int:
    """Return how much memory a case may take at most to surely fit a GPU.

    Args:
        estimated_bytes: how far workspaces that are estimated can be off.
    """
    return min(int(memory_bytes / (1 + ERROR)), max(memory_bytes - estimated_bytes, 1))


def loads_in_parts(case: Case) -> bool:
    """Tell whether a case of this project builds a whole model on a GPU where other programs load one part at a time.

    Under FSDP they load the parts that stay on the GPU. For QLoRA transformers packs each weight in 4 bits as it loads it.
    What the build takes says nothing of them.
    """
    return (case.parallel == "fsdp" and not case.cpu_offload) or case.method == "qlora"


class Need(NamedTuple):
    """What is known of the memory that a batch size needs."""

    fits: bool
    """Whether the batch surely fits, even if its figures are wrong by their error."""
    bytes: int | None
    """The memory that the batch needs. None if it is not known, and more than any GPU has."""


def need_of(case: Case, memory_bytes: int, at: At) -> Need:
    """Return whether the case surely fits the GPU, and how much memory it takes. For a case that does not fit this comes
    from a run without limit."""
    free = at(0)
    if _is_cut_short(free):
        return Need(False, None)
    needed, surely = needed_bytes(free, case), tight(memory_bytes, free.estimated_bytes)
    if needed <= surely:
        return Need(True, needed)
    if _least_bytes(free, case) > surely or not at(surely).fits:
        return Need(False, needed)
    return Need(True, needed if needed <= memory_bytes else needed_bytes(at(memory_bytes), case))


def largest_batch(need: Callable[[int], Need], known: Mapping[int, Need], capacity: int, most: int) -> int:
    """Return the largest batch size that fits, 0 for none. Few runs are needed, because memory grows nearly along a line.

    Args:
        need: tells what a batch needs.
        known: batches that were asked for already.
        most: larger ones are not tried.
    """
    tries = dict(known) or {1: need(1)}
    guesses = 0
    while True:
        good = max((batch for batch, tried in tries.items() if tried.fits), default=0)
        bad = min((batch for batch, tried in tries.items() if not tried.fits and batch > good), default=most + 1)
        if bad - good <= 1 or good >= most:
            return good
        guesses += 1
        guess = _on_line(tries, good, bad, capacity) if guesses <= _GUESSES else None
        if guess is None:
            guess = 2 * good if bad > most and good else (good + bad) // 2
        batch = min(max(guess, good + 1), bad - 1)
        tries[batch] = need(batch)


def _on_line(tries: Mapping[int, Need], good: int, bad: int, capacity: int) -> int | None:
    """Return the batch size that fills the capacity, on the line through the two nearest known ones; None without two."""
    known = {batch: tried.bytes for batch, tried in tries.items() if tried.bytes is not None}
    beside = sorted(known, key=lambda batch: min(abs(batch - good), abs(batch - bad)))[:2]
    if len(beside) < 2:
        return None
    (few, less), (many, more) = sorted((batch, known[batch]) for batch in beside)
    if more <= less:
        return None
    return few + int((capacity - less) * (many - few) / (more - less))
