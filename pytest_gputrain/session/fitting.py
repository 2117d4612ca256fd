"""Finds out which of many cases fit which GPUs, the largest batches that do, and what would make the others fit."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Final, NamedTuple, TypeVar

import msgspec

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.cases.libraries import how_to_install, missing
from pytest_gputrain.cases.validation import complaint, problem
from pytest_gputrain.gate.fit import Need, judge, largest_batch, need_of, tight
from pytest_gputrain.gate.messages import listed
from pytest_gputrain.hardware.catalog import MARKERS, PLATFORMS
from pytest_gputrain.records import Case, EmulatedRun
from pytest_gputrain.records.fit import FitCell, LargestBatch
from pytest_gputrain.session.fit_engines import EmulatedCells
from pytest_gputrain.session.remedies import remedy
from pytest_gputrain.utils.errors import BadCase

_Job = TypeVar("_Job")
_Answer = TypeVar("_Answer")

MOST_BATCH: Final = 1024
"""The largest batch that is tried."""

_IMPORT_SECONDS: Final = 4.0
_BLOCK_SECONDS: Final = 0.06
"""The CPU time of a block of a model, in addition to a second."""
_SHARDED: Final = 3.5
"""A block takes this many times as long if parameters are sharded."""
_TOKEN_SECONDS: Final = {
    **dict.fromkeys(("falcon_mamba", "mamba", "recurrent_gemma", "xlstm"), 0.045),
    **dict.fromkeys(("jamba", "rwkv"), 0.12),
}
"""The time of each token of a sequence, by ``model_type``: layers that transformers computes token by token in torch."""
_LINEAR_SECONDS: Final = 0.4
"""The time of a block of linear attention, which transformers computes in many pieces."""
_UNKNOWN_BLOCKS: Final = 40
"""The assumed number of blocks of a model whose blocks are not counted here."""
_FURTHER: Final = 3
"""Runs that the largest batch of a case on a GPU takes, or a remedy."""


class Asked(NamedTuple):
    """A case and the GPU that it is to fit."""

    case: Case
    gpu: str


class Sorted(NamedTuple):
    """The combinations that are possible, and a sentence about each other one."""

    asked: list[Asked]
    left_out: list[str]


def possible(cases: Sequence[Case], gpus: Sequence[str]) -> Sorted:
    """Sort out cases that make no sense or lack a library, and precisions in which a GPU does not compute."""
    complaints: defaultdict[str, list[Case]] = defaultdict(list)
    sound = []
    for case in cases:
        wrong = complaint(case, MARKERS)
        if wrong is None:
            sound.append(case)
        else:
            complaints[wrong].append(case)
    if names := missing(sound):
        lacking_one = [case for case in sound if missing([case])]
        complaints[f"cannot be predicted without {listed(names)}; {how_to_install(names)}"] = lacking_one
        sound = [case for case in sound if case not in lacking_one]
    left_out = [f"{_named(those)} {what}" for what, those in complaints.items()]
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
    """Return the estimated seconds of an answer that uses no cached results.

    Args:
        further: whether largest batches and remedies are looked for.
    """
    searches = {(_without_batch(case), gpu) for case, gpu in asked}
    seconds = sum(_seconds(case) for case, _ in asked)
    if further:
        seconds += sum(_FURTHER * _seconds(case) for case, _ in searches)
    return _IMPORT_SECONDS + seconds / min(processes, len(asked))


def computes_token_by_token(case: Case) -> bool:
    """Tell whether the model has layers that transformers computes token by token, which takes minutes."""
    return _token_seconds(case) > 0


def _token_seconds(case: Case) -> float:
    return _TOKEN_SECONDS.get(str(architectures()[case.model].trained_part.language.get("model_type")), 0.0)


def _seconds(case: Case) -> float:
    architecture = architectures()[case.model]
    config = architecture.trained_part.language
    kinds = config.get("layer_types")
    linear = kinds.count("linear_attention") if isinstance(kinds, list) else 0
    more = _LINEAR_SECONDS * linear + case.sequence_length * _token_seconds(case)
    layers = config.get("num_hidden_layers") or config.get("num_layers")
    if not isinstance(layers, int):  # The worker will refuse such a config.json with a reason.
        layers = 0
    sharded = _SHARDED if case.parallel in ("fsdp", "zero3") else 1
    return 1 + sharded * _BLOCK_SECONDS * (layers or _UNKNOWN_BLOCKS) + more


class Fitting:
    """Finds out whether cases fit GPUs.

    Args:
        processes: how many cases run at the same time.
        note: called with a text about each step that is done, and how many of how many.
    """

    def __init__(self, engine: EmulatedCells, processes: int, note: Callable[[str, int, int], None]) -> None:
        self._engine = engine
        self._threads = ThreadPoolExecutor(processes, "fit")
        self._note = note
        self._lock = threading.Lock()
        self._known: dict[tuple[Case, str, int], Future[EmulatedRun]] = {}

    def close(self) -> None:
        """End the processes that still run."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._engine.close()
        self._threads.shutdown(wait=True)

    def cells(self, asked: Sequence[Asked], *, remedies: bool) -> list[FitCell]:
        """Return an answer for each case and its GPU, in the order given.

        Args:
            remedies: whether to look for what makes the smallest batch surely fit of those that do not.
        """
        cells = self._done(self._cell, asked, "cases")
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
        """Return the largest batch size of each case that fits its GPU, in the order of ``cells``. Some of them are known
        already."""
        known: defaultdict[tuple[Case, str], list[FitCell]] = defaultdict(list)
        for cell in cells:
            if cell.figures is not None:
                known[_without_batch(cell.case), cell.gpu].append(cell)
        return self._done(self._largest, list(known.values()), "largest batches")

    def _done(self, work: Callable[[_Job], _Answer], jobs: Iterable[_Job], what: str) -> list[_Answer]:
        """Run the jobs, some of them at once, and return their results in order."""
        futures = [self._threads.submit(work, job) for job in jobs]
        if futures:
            self._note(what, 0, len(futures))
        for done, future in enumerate(as_completed(futures), start=1):
            future.result()
            self._note(what, done, len(futures))
        return [future.result() for future in futures]

    def _cell(self, asked: Asked) -> FitCell:
        case, gpu = asked
        try:
            found = judge(
                case, PLATFORMS[gpu].usable_bytes, lambda memory: self._figures(case, gpu, memory, memory_only=memory > 0)
            )
        except BadCase as error:
            return FitCell(case=case, gpu=gpu, fit=None, needed_bytes=None, figures=None, failure=str(error))
        return FitCell(case=case, gpu=gpu, fit=found.fit, needed_bytes=found.needed_bytes, figures=self._figures(case, gpu))

    def _with_remedy(self, cell: FitCell) -> FitCell:
        def changed(case: Case) -> Need | None:
            if problem(case, MARKERS):
                return None
            try:
                return self._need(case, cell.gpu)
            except BadCase:
                return None

        assert cell.figures is not None
        helps = remedy(cell.case, cell.figures, changed, may_fit=cell.fit == "within-error")
        return msgspec.structs.replace(cell, remedy=helps)

    def _largest(self, known: Sequence[FitCell]) -> LargestBatch:
        case, gpu = known[0].case, known[0].gpu
        tried = {cell.case.batch_size: Need(cell.fit in ("fits", "incomplete"), cell.needed_bytes) for cell in known}
        needs = dict(tried)

        def need(batch: int) -> Need:
            needs[batch] = self._need(case.replace(batch_size=batch), gpu)
            return needs[batch]

        try:
            batch, failure = largest_batch(need, tried, tight(PLATFORMS[gpu].usable_bytes), MOST_BATCH), ""
        except BadCase as error:
            batch, failure = 0, str(error)
        return LargestBatch(
            case=case.replace(batch_size=max(1, batch)),
            gpu=gpu,
            batch_size=batch,
            needed_bytes=needs[batch].bytes if batch else None,
            perhaps=max((cell.case.batch_size for cell in known if cell.fit == "within-error"), default=0),
            is_bound=batch >= MOST_BATCH,
            failure=failure,
        )

    def _need(self, case: Case, gpu: str) -> Need:
        return need_of(case, PLATFORMS[gpu].usable_bytes, lambda memory: self._figures(case, gpu, memory, memory_only=True))

    def _figures(self, case: Case, gpu: str, memory_bytes: int = 0, *, memory_only: bool = False) -> EmulatedRun:
        """Return the figures of a case on a GPU of this much memory. They are found only once.

        Raises:
            BadCase: there are none; one sentence.
        """
        key = case, gpu, memory_bytes
        with self._lock:
            future = self._known.get(key)
            is_first = future is None
            if future is None:
                future = self._known[key] = Future()
        if is_first:
            try:
                future.set_result(self._engine.figures(case, gpu, memory_bytes, memory_only=memory_only))
            except BaseException as error:
                future.set_exception(error)
        return future.result()


def _without_batch(case: Case) -> Case:
    return case.replace(batch_size=1)
