"""Judges whether a predicted case fits a GPU, how sure that is, and up to which batch. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec

from pytest_gputrain.gate.prediction import needed_bytes
from pytest_gputrain.records import Case, EmulatedRun, Prediction, Target
from pytest_gputrain.records.fit import Fit

ERROR: Final = 0.04
"""The error of a prediction. Published peaks of cases on one GPU lay within 3.7 % of theirs
(docs/prediction-accuracy.md)."""

_GUESSES: Final = 5
"""Batches that are guessed from a line, before the search goes on by halves."""


def fit_of(prediction: Prediction, at: Callable[[int], Prediction]) -> Fit:
    """Tell whether the case fits the GPU that it was predicted for, and whether an error of the prediction would change
    that.

    Near its capacity the allocator gives cached memory back, so what a case holds without limit is not what it needs. It is
    predicted again for a GPU of a little more, or less, memory, unless its figures tell already.

    Args:
        at: predicts the same for a GPU with so much memory.
    """
    memory = prediction.target.memory_bytes
    assert memory is not None, "a GPU of the catalog has a limit"
    if prediction.fits:
        sure = needed_bytes(prediction) * (1 + ERROR) <= memory or at(tight(memory)).fits
        return "fits" if sure else "within-error"
    peaks = (prediction.peak_allocated_bytes, *prediction.phase_peak_bytes.values())
    least = max(peaks) + prediction.target.context_bytes
    hopeless = least > (1 + ERROR) * memory or not at(round(memory * (1 + ERROR))).fits
    return "does-not-fit" if hopeless else "within-error"


def fit_of_emulated(run: EmulatedRun, target: Target, predicted: Fit | None) -> Fit:
    """Tell whether a case fits that ran on an emulated GPU. The answer is sure where the prediction agrees, or far from the
    limit.

    Args:
        predicted: None where there is no prediction, as of compiled code.
    """
    if not run.fits:
        return "within-error" if predicted in ("fits", "within-error") else "does-not-fit"
    assert target.memory_bytes is not None, "a GPU of the catalog has a limit"
    far = run.peak_reserved_bytes + target.context_bytes <= tight(target.memory_bytes)
    return "fits" if predicted == "fits" or (predicted is None and far) else "within-error"


def tight(memory_bytes: int) -> int:
    """Tell how much memory a case may need of a GPU that it surely fits."""
    return int(memory_bytes / (1 + ERROR))


def loads_in_parts(case: Case) -> bool:
    """Tell whether a case of this project builds a whole model in full width on a GPU, where programs load one part at a
    time.

    Under FSDP they load the parts that stay on the GPU. For QLoRA transformers packs each weight in 4 bits as it loads it.
    What the build takes says nothing of them.
    """
    return (case.parallel == "fsdp" and not case.cpu_offload) or case.method == "qlora"


def of_training(prediction: Prediction, target: Target) -> Prediction:
    """Return the prediction as if the model was loaded in parts: it is judged by what training takes, without limit.

    Args:
        prediction: for the target, or one that has no limit.
    """
    assert target.memory_bytes is not None, "a GPU of the catalog has a limit"
    held = (prediction.peak_reserved_bytes or 0) + target.context_bytes
    fits = held <= target.memory_bytes if prediction.fits is None else prediction.fits
    return msgspec.structs.replace(
        prediction,
        target=target,
        fits=fits,
        phase_peak_bytes={phase: peak for phase, peak in prediction.phase_peak_bytes.items() if phase != "build"},
        largest={phase: rows for phase, rows in prediction.largest.items() if phase != "build"},
    )


class Need(NamedTuple):
    """The memory that is known of a batch."""

    fits: bool
    bytes: int


def largest_batch(need: Callable[[int], Need], known: Mapping[int, Need], capacity: int, most: int) -> int:
    """Find the largest batch that fits, 0 for none, by few predictions: memory grows with the batch nearly along a line.

    Args:
        need: predicts a batch.
        known: batches that were predicted already.
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
    """Find the batch whose memory is the capacity on the line through the two batches nearest to it; None without two."""
    beside = sorted(tries, key=lambda batch: min(abs(batch - good), abs(batch - bad)))[:2]
    if len(beside) < 2:
        return None
    (few, less), (many, more) = sorted((batch, tries[batch].bytes) for batch in beside)
    if more <= less:
        return None
    return few + int((capacity - less) * (many - few) / (more - less))
