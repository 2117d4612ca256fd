"""Describes how the counts of a step differ from those before, with the lines of the program behind it. Pure.

A baseline keeps no numbers of lines, because lines move. So lines are matched by file, function and text. The fall of a
count at a line is subtracted from its growth at a line with the same text, and then at other lines of the same function,
because such lines have moved or were edited. Only the rest is named.
"""

from __future__ import annotations

import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

from pytest_gputrain.gate.messages import count, listed
from pytest_gputrain.records import CountCause, CountFigure, CountName, Counts, LineCount, StepCounts
from pytest_gputrain.records.counts import COUNT_FIGURES, PARTS_OF_WORK
from pytest_gputrain.utils.units import format_bytes, format_flops

_SAID: Final[dict[CountFigure, str]] = {
    "waits": "waits for the GPU {now} {when} ({before} before)",
    "pageable": "copies from or to memory that is not pinned {now} {when} ({before} before)",
    "collectives": "communicates with other GPUs {now} {when} ({before} before)",
    "compilations": "compiles {now} {when} ({before} before)",
    "graph_breaks": "breaks the graph of torch.compile {now} {when} ({before} before)",
    "captures": "captures {now} {when} ({before} before)",
    "mallocs": "asks the driver for memory {now} {when} ({before} before)",
    "frees": "gives memory back to the driver {now} {when} ({before} before)",
    "launches": "launches {now} {when} ({before} before)",
    "library_calls": "calls libraries such as cuBLAS and cuDNN {now} {when} ({before} before)",
    "d2d": "copies within the GPU's memory {now} {when} ({before} before)",
    "h2d_bytes": "copies {now} to the GPU {when} ({before} before)",
    "d2h_bytes": "copies {now} from the GPU {when} ({before} before)",
    "collective_bytes": "exchanges {now} with other GPUs {when} ({before} before)",
    "fp32_flops": "computes {now} in FP32 instead of TF32 {when} ({before} before)",
    "unaligned_flops": "computes {now} on rows that do not start at multiples of 16 bytes {when} ({before} before)",
    "nchw_flops": "computes {now} in convolutions whose channels are not last in memory {when} ({before} before)",
    "work": "asks the GPU for {now} {when} ({before} before)",
    "gpu_work": "has the GPU do {now} {when} ({before} before), those of CUDA graphs included",
    "replays": "launches CUDA graphs {now} {when} ({before} before)",
    "stream_waits": "makes one stream wait for another {now} {when} ({before} before)",
    "memsets": "sets blocks of memory {now} {when} ({before} before)",
    "blocks": "runs {now} of threads {when} ({before} before)",
    "kernels": "runs {now} {when} ({before} before), those of libraries included",
    "python_calls": "calls Python functions {now} {when} ({before} before)",
    "operators": "runs {now} {when} ({before} before)",
    "reads": "reads values that depend on its trained weights, each a wait on a GPU, {now} {when} ({before} before)",
    "other_reads": "reads other values {now} {when} ({before} before)",
    "loads": "loads {now} {when} ({before} before)",
    "loaded_bytes": "loads batches of {now} {when} ({before} before)",
    "loader_workers": "loads its batches by {now} {when} ({before} before)",
    "repeated_updates": "updates again by the same optimizer {now} {when} ({before} before)",
}
_NOUNS: Final[dict[CountFigure, str]] = {
    "work": "task",
    "gpu_work": "task",
    "launches": "kernel",
    "blocks": "block",
    "kernels": "kernel",
    "compilations": "function",
    "captures": "CUDA graph",
    "operators": "operator",
    "loads": "sample",
    "loader_workers": "DataLoader worker",
}
"""The noun for what a figure counts, if it does not count times."""
_ASKS: Final[dict[CountFigure, tuple[CountName, ...]]] = {
    "work": ("launches", "library_calls", "d2d", "replays"),
    "gpu_work": ("launches", "library_calls", "d2d"),
    "pageable": ("h2d_pageable", "d2h_pageable"),
    "h2d_bytes": ("h2d_pageable", "h2d_pinned"),
    "d2h_bytes": ("d2h_pageable", "d2h_pinned"),
    "collective_bytes": ("collectives",),
    "fp32_flops": ("library_calls",),
    "unaligned_flops": ("library_calls",),
    "nchw_flops": ("library_calls",),
    "loaded_bytes": ("loads",),
}
"""The causes of the figures that have not their names. Blocks have none."""
_IMPLIED: Final[dict[CountFigure, tuple[CountFigure, ...]]] = {
    "h2d_bytes": ("waits", "pageable"),
    "d2h_bytes": ("waits", "pageable"),
    "collective_bytes": ("collectives",),
    "loaded_bytes": ("loads",),
    "gpu_work": PARTS_OF_WORK,
}
"""Figures of which nothing is said where one of these changes at the same line: who reads a scalar copies its bytes."""
_LEAST_SHARE_OF_WORK: Final = 0.2
"""A part of the work is described if this share of the change, or the most of it, is its."""
_MOST_PLACES: Final = 2
_MOST_LINES: Final = 6
"""The most lines that are listed beside those of the baseline; the others are added up."""
_UNITS: Final = ("_bytes", "_flops")
"""The ends of the names of figures that are no numbers of times."""


class Difference(NamedTuple):
    """The difference of a figure between a step and the step of the same index in the baseline."""

    metric: CountFigure
    figures: tuple[CountFigure, ...]
    """The figure itself; of the work, its parts."""
    step: int
    """The index of the step that differs most."""
    before: StepCounts
    now: StepCounts
    when: str
    """The steps that differ: ``a step``, ``in step 3`` or ``in 5 of its 10 steps``."""

    def changed(self, sign: int) -> Iterator[CountFigure]:
        """Yield the figures that make up most of the growth; with ``sign`` -1, most of the fall."""
        changes = {name: sign * (self.now.figure(name) - self.before.figure(name)) for name in self.figures}
        least = min(max(changes.values()), _LEAST_SHARE_OF_WORK * sum(changes.values()))
        yield from (name for name, change in changes.items() if change > 0 and change >= least)


class _Spot(NamedTuple):
    """A line of code with counts. It has no line number, because edits elsewhere in the file change that."""

    own: tuple[str, str, str] | None
    library: tuple[str, str] | None
    backward: bool
    by: str = ""
    """The function that is called, where no line is known. Kernels are not named: baselines keep no names of theirs."""


class _Clause(NamedTuple):
    """A figure that has grown."""

    metric: CountFigure
    figure: CountFigure
    said: str
    places: tuple[tuple[CountCause, int], ...]
    """Where most of the growth is, and how much."""

    @property
    def line(self) -> _Spot | None:
        """The line with the largest growth."""
        return _spot(self.places[0][0]) if self.places else None


def describe_growth(differences: Iterable[Difference], before: Counts, now: Counts) -> dict[CountFigure, str]:
    """Describe figures that have grown, in one clause for all that grow at the same line.

    Returns:
        The text by the first metric that it is about: ``waits for the GPU 2 times a step (1 before): 1 more at train.py:42
        in train, loss.item()``.
    """
    by_line: defaultdict[_Spot | None, list[_Clause]] = defaultdict(list)
    for difference in differences:
        for figure in difference.changed(1):
            places = tuple(_places(figure, difference.step, before, now))[:_MOST_PLACES]
            clause = _Clause(difference.metric, figure, _said(figure, difference), places)
            by_line[clause.line].append(clause)
    texts: defaultdict[CountFigure, list[str]] = defaultdict(list)
    for clauses in by_line.values():
        names = [clause.figure for clause in clauses]
        told = [clause for clause in clauses if not set(_IMPLIED.get(clause.figure, ())) & set(names)]
        texts[clauses[0].metric].append(_described(told))
    return {metric: "; ".join(parts) for metric, parts in texts.items()}


def describe_falls(differences: Iterable[Difference]) -> dict[CountFigure, str]:
    """Describe figures that have fallen: ``waits for the GPU 1 time a step (2 before)``."""
    fallen = {figure: difference for difference in differences for figure in difference.changed(-1)}
    return {
        figure: _said(figure, difference)
        for figure, difference in fallen.items()
        if not fallen.keys() & _IMPLIED.get(figure, ())
    }


def lines_beside(figure: CountFigure, step: int, before: Counts, now: Counts) -> tuple[LineCount, ...]:
    """Return the count of each line in one step, now and before. Lines that have grown come first, then those with the
    highest counts."""
    if before.lines_unknown or now.lines_unknown:
        return ()
    numbers: defaultdict[_Spot, list[int]] = defaultdict(lambda: [0, 0])
    causes: dict[_Spot, CountCause] = {}
    more: Counter[_Spot] = Counter()
    for at, counts in enumerate((before, now)):
        for cause, number in _asked(figure, counts, counts.steps[step]):
            told = _of_line(cause)
            numbers[_spot(told)][at] += number
            causes[_spot(told)] = told
    for cause, number in _places(figure, step, before, now):
        more[_spot(_of_line(cause))] += number
    for alike in (_text_of, _function_of):
        _match_edited(numbers, alike)
    lines = [
        LineCount(line=_place(figure, causes[spot]).removeprefix("at "), value=new, baseline=old, more=more[spot])
        for spot, (old, new) in sorted(numbers.items(), key=lambda line: (-more[line[0]], -max(line[1])))
    ]
    rest = lines[_MOST_LINES:]
    if rest:
        value, baseline = sum(line.value for line in rest), sum(line.baseline for line in rest)
        lines[_MOST_LINES:] = [LineCount(line=f"{len(rest)} other lines", value=value, baseline=baseline)]
    return tuple(lines)


def _match_edited(numbers: dict[_Spot, list[int]], alike: Callable[[_Spot], Hashable]) -> None:
    """Match a line that is gone with a similar new line, which is the same line after an edit."""
    for spot, (before, now) in list(numbers.items()):
        if before or alike(spot) is None:
            continue
        gone = [other for other, counts in numbers.items() if not counts[1] and alike(other) == alike(spot)]
        if gone:
            numbers[spot][0] = numbers.pop(min(gone, key=lambda other: abs(numbers[other][0] - now)))[0]


def by_line(counts: Counts, kind: int, figures: Iterable[CountFigure]) -> dict[str, dict[CountFigure, int]]:
    """Return the counts of each line in a step of one kind, without counts that are 0.

    A line of the program is listed once, whatever it calls in torch.
    """
    lines: defaultdict[str, dict[CountFigure, int]] = defaultdict(dict)
    for figure in figures:
        for cause, number in _asked(figure, counts, kind):
            line = _place(figure, _of_line(cause)).removeprefix("at ")
            lines[line][figure] = lines[line].get(figure, 0) + number
    return lines


def _of_line(cause: CountCause) -> CountCause:
    """Return the cause without the function of torch and the shape, so that all causes at one line of the user's code are
    equal."""
    in_torch = cause.library is not None and cause.library.file.startswith("torch/")
    library = None if cause.own and in_torch else cause.library
    return msgspec.structs.replace(cause, library=library, shape="")


def most_of_a_step(figure: CountFigure, counts: Counts) -> int:
    """Return the highest value that a figure has in any step."""
    return max(kind.figure(figure) for kind in counts.kinds)


def describe_most(figure: CountFigure, counts: Counts) -> tuple[str, str]:
    """Describe the step that has most of a figure: ``waits for the GPU 3 times in step 2``, and the line with the largest
    part of it, ``2 at train.py:42 in train, loss.item()``, empty if that is not known."""
    values = [counts.of_step(step).figure(figure) for step in range(len(counts.steps))]
    most = max(values)
    step = values.index(most)
    when = "a step" if min(values) == most else f"in step {step + 1}"
    said = f"{_number_of(figure, most)} {when}".join(_SAID[figure].split("{now} {when} ({before} before)"))
    asked: Counter[_Spot] = Counter()
    causes: dict[_Spot, CountCause] = {}
    for cause, number in _asked(figure, counts, counts.steps[step]):
        asked[_spot(cause)] += number
        causes.setdefault(_spot(cause), cause)
    if counts.lines_unknown or not asked:
        return said, ""
    [(spot, number)] = asked.most_common(1)
    return said, f"{format_count(figure, number)} {_place(figure, causes[spot])}"


def count_changes(before: Counts, now: Counts, *, only_more: bool = False) -> Iterator[str]:
    """Name each figure that differs in steps that both have: ``waits 0 -> 1 a step``, or where steps differ in it the sum,
    ``waits 2 -> 3 in 4 steps``.

    Args:
        only_more: whether only those are named that are higher in a step.
    """
    in_common = [(before.kinds[old], now.kinds[new]) for old, new in zip(before.steps, now.steps, strict=False)]
    calling = [pair for pair in in_common if all(step.python_calls for step in pair)] if before.python == now.python else []
    for figure in COUNT_FIGURES:
        pairs = calling if figure == "python_calls" else in_common
        if figure == "work" or not pairs:  # The figures that `work` consists of are named instead.
            continue
        if figure == "gpu_work" and not (before.launches_graphs or now.launches_graphs):
            continue
        old, new = ([step.figure(figure) for step in side] for side in zip(*pairs, strict=True))
        if old == new or (only_more and not any(map(operator.gt, new, old))):
            continue
        alike = len(set(old)) == len(set(new)) == 1
        ends = (old[0], new[0]) if alike else (sum(old), sum(new))
        shown = [format_count(figure, number) for number in ends]
        if shown[0] == shown[1]:
            shown = [f"{number:,}" for number in ends]
        moved = " at other steps" if ends[0] == ends[1] else ""
        when = "a step" if alike else f"in {count(len(pairs), 'step')}"
        yield f"{figure} {shown[0]} -> {shown[1]} {when}{moved}"


def _described(clauses: Sequence[_Clause]) -> str:
    """Describe clauses of one line, with the places behind the first of them."""
    heads = listed(clause.said for clause in clauses)
    first = clauses[0]
    if not first.places:
        return heads
    if len(clauses) > 1:
        return f"{heads}: more of each {_place(first.figure, first.places[0][0])}"
    places = (f"{format_count(first.figure, more)} more {_place(first.figure, cause)}" for cause, more in first.places)
    return f"{heads}: {', and '.join(places)}"


def _said(figure: CountFigure, difference: Difference) -> str:
    now, before = difference.now.figure(figure), difference.before.figure(figure)
    shown = [_number_of(figure, now), format_count(figure, before)]
    if figure.endswith(_UNITS) and shown[0] == shown[1]:
        shown = [f"{value:,} {'FLOP' if figure.endswith('_flops') else 'B'}" for value in (now, before)]
    return _SAID[figure].format(now=shown[0], before=shown[1], when=difference.when)


def _number_of(figure: CountFigure, number: int) -> str:
    """Return a number with what is counted: ``3 times``, ``1 kernel``, ``4.00 MiB``."""
    amount = format_count(figure, number)
    return amount if figure.endswith(_UNITS) else f"{amount} {_NOUNS.get(figure, 'time')}{'' if number == 1 else 's'}"


def format_count(figure: CountFigure, number: float) -> str:
    """Return a number of times, or bytes or FLOPs with their unit. Means of steps may have a fraction."""
    if figure.endswith("_bytes"):
        return format_bytes(number)
    if figure.endswith("_flops"):
        return format_flops(number)
    return f"{int(number):,}" if number == int(number) else f"{number:,.2f}"


def _place(figure: CountFigure, cause: CountCause) -> str:
    """Name a place: ``at train.py:42 in train, loss.item()``, or ``in torch/optim/adam.py _single_tensor_adam``."""
    own, library = cause.own, cause.library
    backward = "in the backward pass of" if own else "in a backward pass"
    words = [backward] if cause.backward else ["at"] if own else []
    if own:
        words.append(f"{own.at} in {own.function}")
    text = " ".join(words)
    if library:
        text += f"{', ' if text else ''}in {library.file} {library.function}".rstrip()
    elif own and own.text:
        text += f", {own.text}"
    elif not text:
        by = f"by {cause.by}" if cause.by else "at other lines"
        text = f'for torch.compile\'s reason "{cause.by}"' if figure == "graph_breaks" else by
    return f"{text} ({cause.shape})" if cause.shape and figure.endswith("_flops") else text


def _places(figure: CountFigure, step: int, before: Counts, now: Counts) -> Iterator[tuple[CountCause, int]]:
    """Yield the causes of a figure's growth in one step, each with its growth, the largest first."""
    if before.lines_unknown or now.lines_unknown:
        return
    more: Counter[_Spot] = Counter()
    causes: dict[_Spot, CountCause] = {}
    most: Counter[_Spot] = Counter()
    for cause, number in _asked(figure, now, now.steps[step]):
        spot = _spot(cause)
        more[spot] += number
        if number > most[spot]:
            causes[spot], most[spot] = cause, number
    for cause, number in _asked(figure, before, before.steps[step]):
        more[_spot(cause)] -= number
    for alike in (_text_of, _function_of):
        # Equal numbers are subtracted from each other first, because they belong to one line that was moved or edited.
        for exactly in (True, False):
            _set_off(more, alike, exactly=exactly)
    for spot, number in more.most_common():
        if number > 0 and any(spot):
            yield causes[spot], number


def _asked(figure: CountFigure, counts: Counts, kind: int) -> Iterator[tuple[CountCause, int]]:
    """Yield each cause of a figure in steps of one kind, with its count."""
    what = _ASKS.get(figure, (figure,))
    slow = figure.removesuffix("_flops") if figure.endswith("_flops") else None
    for cause in counts.causes:
        numbers = cause.bytes if figure.endswith(_UNITS) else cause.counts
        # For the host a replay is one task, so what the graph does counts as `gpu_work` only.
        by_host = not (cause.replayed and figure in ("work", *PARTS_OF_WORK))
        if cause.what in what and numbers and numbers[kind] and slow in (None, cause.slow) and by_host:
            yield cause, numbers[kind]


def _spot(cause: CountCause) -> _Spot:
    own = (cause.own.file, cause.own.function, cause.own.text) if cause.own else None
    library = (cause.library.file, cause.library.function) if cause.library else None
    # Names of kernels and operators differ between versions, so they are not compared. Other names are compared only if no
    # line is known.
    by = "" if own or library or cause.what in ("launches", "operators") else cause.by
    return _Spot(own, library, cause.backward, by)


def _text_of(spot: _Spot) -> Hashable:
    return (spot.own[2], spot.library, spot.backward) if spot.own and spot.own[2] else None


def _function_of(spot: _Spot) -> Hashable:
    return (spot.own[:2], spot.library, spot.backward) if spot.own else None


def _set_off(more: Counter[_Spot], alike: Callable[[_Spot], Hashable], *, exactly: bool) -> None:
    """Subtract the fall of a count at one place from its growth at a similar place, because a line that was moved or edited
    shows both.

    Args:
        exactly: whether to do so only where both changed by the same number.
    """
    for gaining, gain in more.most_common():
        for losing, loss in list(more.items()):
            if alike(gaining) is not None and alike(gaining) == alike(losing) and (gain == -loss or not exactly):
                moved = max(min(more[gaining], -loss), 0)
                more[gaining] -= moved
                more[losing] += moved
