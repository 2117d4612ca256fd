"""Finds out which of many cases fit which GPUs, the largest batches that do, and what would make the others fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.cases.libraries import how_to_install, missing
from pytest_gputrain.cases.validation import problem
from pytest_gputrain.execution.prediction_pool import PredictionPool
from pytest_gputrain.gate.fit import Need, fit_of, largest_batch, loads_in_parts, of_training, tight
from pytest_gputrain.gate.messages import describe_failure
from pytest_gputrain.gate.prediction import needed_bytes
from pytest_gputrain.hardware.catalog import MARKERS, PLATFORMS
from pytest_gputrain.hardware.targets import target_of, with_tf32
from pytest_gputrain.records import Case, Crashed, Prediction
from pytest_gputrain.records.fit import FitCell, LargestBatch
from pytest_gputrain.session.remedies import remedy
from pytest_gputrain.session.tasks import full_size_task
from pytest_gputrain.utils.errors import BadCase

_Job = TypeVar("_Job")
_Answer = TypeVar("_Answer")

MOST_BATCH: Final = 1024
"""The largest batch that is tried."""

_IMPORT_SECONDS: Final = 5.0
_SHALLOW_SECONDS: Final = 1.7
"""The time of a model that is predicted from three shallow ones (docs/predicted-cases.md)."""
_BLOCK_SECONDS: Final = 0.15
"""The time of a block of any other model, in addition to a second."""
_TOKEN_SECONDS: Final = {
    **dict.fromkeys(("falcon_mamba", "mamba", "recurrent_gemma"), 0.045),
    **dict.fromkeys(("jamba", "rwkv"), 0.12),
}
"""The time of each token of a sequence, by ``model_type``: layers that transformers computes token by token in torch."""
_LINEAR_SECONDS: Final = 0.4
"""The time of a block of linear attention, which transformers computes in many pieces."""
_UNKNOWN_BLOCKS: Final = 40
"""The assumed number of blocks of a model whose blocks are not counted here."""
_FURTHER: Final = 3
"""Predictions that the largest batch of a case on a GPU takes, or a remedy."""


class Asked(NamedTuple):
    """A case for a GPU."""

    case: Case
    gpu: str


class Sorted(NamedTuple):
    """Combinations that can be, and sentences about the others."""

    asked: list[Asked]
    left_out: list[str]


def possible(cases: Sequence[Case], gpus: Sequence[str]) -> Sorted:
    """Sort out cases that make no sense or need a library that is not installed, and precisions that a GPU does not compute
    in."""
    complaints: defaultdict[str, list[Case]] = defaultdict(list)
    sound = []
    for case in cases:
        sentence = problem(case, MARKERS)
        if sentence is None:
            sound.append(case)
        else:
            complaints[sentence.removeprefix(f"the case {case} ")].append(case)
    if names := missing(sound):
        lacking_one = [case for case in sound if missing([case])]
        complaints[f"cannot be predicted without {' and '.join(names)}; {how_to_install(names)}"] = lacking_one
        sound = [case for case in sound if case not in lacking_one]
    left_out = [f"{_named(wrong)} {complaint}" for complaint, wrong in complaints.items()]
    asked = []
    for gpu in gpus:
        platform = PLATFORMS[gpu]
        lacking = {case.precision for case in sound if platform.lacks(case.precision)}
        for precision in sorted(lacking):
            left_out.append(f"{platform.title} does not compute in {precision}; choose precision=fp16-amp or fp32 for it")
        asked += [Asked(case, gpu) for case in sound if case.precision not in lacking]
    return Sorted(asked, left_out)


def _named(cases: Sequence[Case]) -> str:
    more = len(cases) - 1
    return f"the case {cases[0]}" + (f" (and {more} alike)" if more else "")


def seconds_of(asked: Sequence[Asked], processes: int, *, further: bool) -> float:
    """Estimate how long the answer takes, nothing remembered.

    Args:
        further: whether largest batches and remedies are looked for.
    """
    searches = {(_without_batch(case), gpu) for case, gpu in asked}
    seconds = sum(_seconds(case) for case, _ in asked)
    if further:
        seconds += sum(_FURTHER * _seconds(case) for case, _ in searches)
    return _IMPORT_SECONDS + seconds / min(processes, len(asked))


def _seconds(case: Case) -> float:
    architecture = architectures()[case.model]
    config = architecture.trained_part.language
    kinds = config.get("layer_types")
    linear = kinds.count("linear_attention") if isinstance(kinds, list) else 0
    more = _LINEAR_SECONDS * linear + case.sequence_length * _TOKEN_SECONDS.get(str(config.get("model_type")), 0)
    layers = architecture.repetitions or config.get("num_hidden_layers", 0)
    if not isinstance(layers, int):  # in a config.json that the worker will refuse
        layers = 0
    if layers and case.parallel in ("single", "fsdp"):
        return _SHALLOW_SECONDS + more
    return 1 + _BLOCK_SECONDS * (layers or _UNKNOWN_BLOCKS) + more


class Fitting:
    """Answers for cases and GPUs.

    Args:
        root: folder that files named by cases are relative to.
        note: called with a text about each step that is done, and how many of how many.
    """

    def __init__(self, pool: PredictionPool, root: Path, note: Callable[[str, int, int], None]) -> None:
        self._pool = pool
        self._root = root
        self._note = note

    def cells(self, asked: Sequence[Asked], *, remedies: bool) -> list[FitCell]:
        """Predict each case for its GPU, in the order given.

        Args:
            remedies: whether to look for what makes the smallest batch surely fit of those that do not.
        """
        cells = self._done(self._cell, asked, "predictions")
        unfit: dict[tuple[Case, str], int] = {}
        for number, cell in enumerate(cells):
            if cell.fit in ("does-not-fit", "within-error"):
                key = _without_batch(cell.case), cell.gpu
                if key not in unfit or cell.case.batch_size < cells[unfit[key]].case.batch_size:
                    unfit[key] = number
        if remedies:
            numbers = list(unfit.values())
            helped = self._done(self._with_remedy, [cells[number] for number in numbers], "remedies")
            for number, cell in zip(numbers, helped, strict=True):
                cells[number] = cell
        return cells

    def largest(self, cells: Sequence[FitCell]) -> list[LargestBatch]:
        """Find the largest batch of each case that fits each GPU, in the order of ``cells``, some of which are known."""
        known: defaultdict[tuple[Case, str], list[FitCell]] = defaultdict(list)
        for cell in cells:
            if cell.prediction is not None:
                known[_without_batch(cell.case), cell.gpu].append(cell)
        return self._done(self._largest, list(known.values()), "largest batches")

    def _done(self, work: Callable[[_Job], _Answer], jobs: Iterable[_Job], what: str) -> list[_Answer]:
        """Do the jobs, as many at once as the pool has processes, and return their answers in order."""
        numbered = list(enumerate(jobs))
        answers: dict[int, _Answer] = {}
        if numbered:
            self._note(what, 0, len(numbered))
        for (number, _), answer in self._pool.map(lambda job: work(job[1]), numbered):
            answers[number] = answer
            self._note(what, len(answers), len(numbered))
        return [answers[number] for number, _ in numbered]

    def _cell(self, asked: Asked) -> FitCell:
        case, gpu = asked
        try:
            prediction = self._predicted(case, gpu)
            fit = fit_of(prediction, lambda memory: self._predicted(case, gpu, memory))
        except BadCase as error:
            return FitCell(case=case, gpu=gpu, fit=None, needed_bytes=None, prediction=None, failure=str(error))
        return FitCell(case=case, gpu=gpu, fit=fit, needed_bytes=needed_bytes(prediction), prediction=prediction)

    def _with_remedy(self, cell: FitCell) -> FitCell:
        def changed(case: Case) -> Prediction | None:
            if problem(case, MARKERS):
                return None
            try:
                surely = self._predicted(case, cell.gpu, tight(_memory(cell.gpu)))
                # What it takes is told of the whole GPU, where the allocator gives less back.
                return self._predicted(case, cell.gpu) if surely.fits else surely
            except BadCase:
                return None

        assert cell.prediction is not None
        helps = remedy(cell.case, cell.prediction, changed, may_fit=cell.fit == "within-error")
        return msgspec.structs.replace(cell, remedy=helps)

    def _largest(self, known: Sequence[FitCell]) -> LargestBatch:
        case, gpu = known[0].case, known[0].gpu

        def need(batch: int) -> Need:
            prediction = self._predicted(case.replace(batch_size=batch), gpu, tight(_memory(gpu)))
            return Need(bool(prediction.fits), needed_bytes(prediction))

        tried = {
            cell.case.batch_size: Need(cell.fit == "fits", cell.needed_bytes)
            for cell in known
            if cell.needed_bytes is not None
        }
        try:
            batch = largest_batch(need, tried, tight(_memory(gpu)), MOST_BATCH)
            # It fits with less memory, which `need` has found or a cell shows.
            prediction, failure = self._predicted(case.replace(batch_size=batch), gpu) if batch else None, ""
        except BadCase as error:
            batch, prediction, failure = 0, None, str(error)
        return LargestBatch(
            case=case.replace(batch_size=max(1, batch)),
            gpu=gpu,
            batch_size=batch,
            needed_bytes=None if prediction is None else needed_bytes(prediction),
            roofline_seconds=None if prediction is None else prediction.roofline_seconds,
            perhaps=max((cell.case.batch_size for cell in known if cell.fit == "within-error"), default=0),
            is_bound=batch >= MOST_BATCH,
            failure=failure,
        )

    def _predicted(self, case: Case, gpu: str, memory_bytes: int | None = None) -> Prediction:
        """Predict the case for the GPU, or for one that is alike but for its memory.

        Raises:
            BadCase: there is no prediction; one sentence.
        """
        target = target_of(gpu)
        target = with_tf32(target, case.tf32)
        if memory_bytes is not None:
            target = msgspec.structs.replace(target, memory_bytes=memory_bytes)
        reply = self._pool.predict(full_size_task(case, self._root, target=target))
        in_parts = loads_in_parts(case)
        if in_parts and isinstance(reply, Prediction) and reply.refused is not None and reply.refused.phase == "build":
            unlimited = msgspec.structs.replace(target, memory_bytes=None)
            reply = self._pool.predict(full_size_task(case, self._root, target=unlimited))
        if isinstance(reply, Crashed) and reply.refused:
            raise BadCase(reply.sentence)  # which names the model, and is the same for all of its cases
        if not isinstance(reply, Prediction):
            raise BadCase(f"{case} {describe_failure(reply, 'prediction')}")
        return of_training(reply, target) if in_parts else reply


def _without_batch(case: Case) -> Case:
    return case.replace(batch_size=1)


def _memory(gpu: str) -> int:
    memory = target_of(gpu).memory_bytes
    assert memory is not None, "every GPU of the catalog has a limit"
    return memory
