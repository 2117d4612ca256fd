"""Defines the records of the counts of training steps, such as kernel launches, copies and waits, with the lines that cause
them.

A run on a CPU has the figures of them that exist there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Final, Literal, get_args

import msgspec
from msgspec import Struct

from pytest_gputrain.records.whole import Whole

CountName = Literal[
    "waits",
    "launches",
    "library_calls",
    "kernels",
    "h2d_pageable",
    "h2d_pinned",
    "d2h_pageable",
    "d2h_pinned",
    "d2d",
    "memsets",
    "stream_waits",
    "collectives",
    "mallocs",
    "frees",
    "compilations",
    "graph_breaks",
    "captures",
    "replays",
    "python_calls",
    "operators",
    "reads",
    "other_reads",
    "loads",
    "loader_workers",
    "repeated_updates",
]
"""What is counted; `StepCounts` explains each."""

CountFigure = Literal[
    "waits",
    "pageable",
    "collectives",
    "compilations",
    "graph_breaks",
    "captures",
    "mallocs",
    "frees",
    "work",
    "gpu_work",
    "launches",
    "library_calls",
    "d2d",
    "h2d_bytes",
    "d2h_bytes",
    "collective_bytes",
    "fp32_flops",
    "unaligned_flops",
    "nchw_flops",
    "stream_waits",
    "replays",
    "memsets",
    "blocks",
    "kernels",
    "python_calls",
    "operators",
    "reads",
    "other_reads",
    "loads",
    "loaded_bytes",
    "loader_workers",
    "repeated_updates",
]
"""A figure of a step that is judged, told, limited or tolerated. Three are the FLOPs of a `SlowClass`; `StepCounts` explains
the others."""

COUNT_FIGURES: Final[tuple[CountFigure, ...]] = get_args(CountFigure)

PARTS_OF_WORK: Final[tuple[CountFigure, ...]] = ("launches", "library_calls", "d2d", "replays")
"""The tasks that the host gives to the GPU."""
DETAILS: Final[frozenset[CountFigure]] = frozenset({*PARTS_OF_WORK, "gpu_work", "memsets", "blocks", "kernels"})
"""Figures that tables leave out: the parts of the work, and what is never judged."""

MAIN: Final[tuple[CountFigure, ...]] = ("waits", "work", "reads", "operators")
"""Figures that narrow tables have: those of emulated GPUs, and those of a CPU in their place."""
OF_THE_PROGRAM: Final[tuple[CountFigure, ...]] = ("loads", "loaded_bytes", "loader_workers", "repeated_updates")
"""Figures of what the program is meant to do. Each change is mentioned, also a fall: fewer processes load slower, and fewer
updates train less."""
_PROFILED: Final[tuple[CountFigure, ...]] = (
    "waits",
    "pageable",
    "collectives",
    "compilations",
    "graph_breaks",
    "captures",
    "mallocs",
    "frees",
    "d2d",
    "stream_waits",
    "replays",
    "memsets",
    "kernels",
)
"""Figures that a profiler of a GPU tells. ``waits``, ``pageable``, ``compilations``, ``graph_breaks``, ``captures``, ``d2d``
and ``replays`` can be compared with those of emulated runs. The others cannot: libraries set memory, make streams wait and
exchange several tensors in one kernel, the caches of allocators are filled otherwise, and emulated runs count no kernels."""
_ON_A_CPU_ONLY: Final[tuple[CountFigure, ...]] = ("operators", "reads", "other_reads")
_ON_BOTH: Final[tuple[CountFigure, ...]] = (
    "collectives",
    "collective_bytes",
    "compilations",
    "graph_breaks",
    "python_calls",
    *OF_THE_PROGRAM,
)

SlowClass = Literal["fp32", "unaligned", "nchw"]
"""A class of products and convolutions that a GPU computes slower than others of the same shape: in FP32 where TF32 would
multiply on tensor cores; with rows that do not start at multiples of 16 bytes (8 elements of 16 bits); a convolution of
16-bit or TF32 tensors whose channels are not the last dimension in memory."""


class StepCounts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The counts of one step, such as kernel launches, copies and waits, of the training thread and autograd's threads."""

    update: bool = True
    """Whether the optimizer was to update at the end of the step."""
    waits: Whole = 0
    """Times that the host waits until the GPU is done, as in ``loss.item()``."""
    launches: Whole = 0
    """Kernels launched."""
    blocks: Whole = 0
    """Blocks of threads in the grids of these kernels."""
    library_calls: Whole = 0
    """Calls of cuBLAS, cuDNN and the like that compute on the GPU."""
    kernels: Whole = 0
    """Kernels that the GPU runs, those of libraries included, without collectives. A run on a real GPU alone has them, in
    place of launches and library calls. 0 in an emulated run."""
    h2d_pageable: Whole = 0
    """Copies from memory of the host that is not pinned, for which the host waits."""
    h2d_pinned: Whole = 0
    """Copies from pinned memory."""
    h2d_bytes: Whole = 0
    """Bytes of all copies from the host."""
    d2h_pageable: Whole = 0
    """Copies to memory of the host that is not pinned."""
    d2h_pinned: Whole = 0
    """Copies to pinned memory."""
    d2h_bytes: Whole = 0
    """Bytes of all copies to the host."""
    d2d: Whole = 0
    """Copies on the device, without those that a kernel makes."""
    d2d_bytes: Whole = 0
    """Bytes of these copies."""
    memsets: Whole = 0
    """Blocks of memory set to a value by the driver."""
    stream_waits: Whole = 0
    """Times that a stream is made to wait for another one, as by ``stream.wait_event()``."""
    collectives: Whole = 0
    """Exchanges with other GPUs."""
    collective_bytes: Whole = 0
    """Bytes of these exchanges: of each, the larger of what this GPU gives and of what it gets."""
    mallocs: Whole = 0
    """Requests for memory to the driver, of the device and pinned, which torch's caches did not have."""
    frees: Whole = 0
    """Blocks of memory given back to the driver."""
    compilations: Whole = 0
    """Functions that torch.compile compiles."""
    graph_breaks: Whole = 0
    """Places where torch.compile gives up a graph."""
    captures: Whole = 0
    """CUDA graphs that are captured."""
    replays: Whole = 0
    """Launches of CUDA graphs, each one task for the host."""
    replayed: Whole = 0
    """Kernels, library calls and copies on the device that these graphs run."""
    operators: Whole = 0
    """Operators that are no views, counted in a run on a CPU. This and the next two figures are 0 on an emulated GPU."""
    reads: Whole = 0
    """Times that the program reads a value which depends on trained parameters, as in ``loss.item()``. On a GPU each is a
    wait."""
    other_reads: Whole = 0
    """Times that it reads another value, which may be on the host when the program runs on a GPU."""
    library_flops: Whole = 0
    """Floating-point operations of matrix products and convolutions in libraries, without those whose shape is not known."""
    slow_flops: dict[SlowClass, Whole] = {}
    """The floating-point operations of these products and convolutions that are of a slower class."""
    python_calls: Whole = 0
    """Calls of Python functions, counted in one further step with the same other counts. 0 if they were not counted."""
    loads: Whole = 0
    """Samples that data sets give for the batches which the step takes from torch's DataLoader. Own code alone has them, and
    a real GPU has neither them nor the next three figures."""
    loaded_bytes: Whole = 0
    """Bytes of the tensors in these batches."""
    loader_workers: Whole = 0
    """Processes of the DataLoaders that give these batches. 0 if the process that trains loads them itself."""
    repeated_updates: Whole = 0
    """Steps of an optimizer that has already stepped in this step. 0 if each optimizer steps once."""

    @property
    def work(self) -> int:
        """The number of tasks that the host gives to the GPU: launches, library calls, copies on the device, and launches of
        CUDA graphs."""
        return self.launches + self.library_calls + self.d2d + self.replays

    @property
    def gpu_work(self) -> int:
        """The number of tasks that the GPU does: those that the host starts, with the tasks of a CUDA graph in place of its
        launch."""
        return self.work - self.replays + self.replayed

    @property
    def pageable(self) -> int:
        """Copies from and to memory that is not pinned."""
        return self.h2d_pageable + self.d2h_pageable

    @property
    def fp32_flops(self) -> int:
        """Floating-point operations of the class ``fp32``."""
        return self.slow_flops.get("fp32", 0)

    @property
    def unaligned_flops(self) -> int:
        """Floating-point operations of the class ``unaligned``."""
        return self.slow_flops.get("unaligned", 0)

    @property
    def nchw_flops(self) -> int:
        """Floating-point operations of the class ``nchw``."""
        return self.slow_flops.get("nchw", 0)

    def figure(self, name: CountFigure) -> int:
        """Return one figure."""
        value: int = getattr(self, name)
        return value


class Place(Struct, frozen=True, omit_defaults=True):
    """A line of Python code, with its function and its text."""

    file: str
    """The path, for own code from the folder of the project, for a library from ``site-packages``."""
    function: str
    """The qualified name of the function. Empty if the file as a whole is meant."""
    text: str = ""
    """The line itself, for own code."""
    line: Whole = 0
    """The number of the line. Baselines keep none, because lines move."""

    @property
    def at(self) -> str:
        """The line in a sentence: ``train.py:42``."""
        return f"{self.file}:{self.line}" if self.line else self.file


class CountCause(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A place in the code, with how many kernels it launches, or how many other events of one type it causes, in each kind
    of step."""

    what: CountName
    """What is counted."""
    by: str = ""
    """The kernel, or the function of CUDA or a library. Baselines keep no names of kernels."""
    own: Place | None = None
    """The innermost line of the user's own files; in a backward pass that of the forward pass."""
    library: Place | None = None
    """The innermost line of Python, where it is another one."""
    backward: bool = False
    """Whether this happens in a backward pass."""
    replayed: bool = False
    """Whether a CUDA graph does this at its launch. The lines are then those of its capture."""
    shape: str = ""
    """The shape of a product or a convolution of a slower class: ``64 x 50257 x 512 bf16``."""
    slow: SlowClass | None = None
    """The slower class."""
    counts: tuple[Whole, ...]
    """The count in each kind of step."""
    bytes: tuple[Whole, ...] = ()
    """The bytes of copies, collectives and memory, and the floating-point operations of library calls, by kind of step."""


class Counts(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The counts of the timed steps of a case, such as kernel launches, copies and waits. Steps with the same counts at the
    same lines are of one kind."""

    steps: tuple[Whole, ...]
    """The kind of each timed step, by its index in ``kinds``."""
    kinds: tuple[StepCounts, ...]
    """The counts of a step of each kind."""
    causes: tuple[CountCause, ...] = ()
    """The places in the code behind these counts, the largest first."""
    first: Whole = 0
    """The number of steps before the first timed one, of the warm-up."""
    others: tuple[CountCause, ...] = ()
    """The counts of other threads than the training's, by place in the code. They are not judged."""
    lines_unknown: str = ""
    """The reason why causes have no lines."""
    python: str = ""
    """The version of Python whose calls were counted, such as ``3.12``, because versions differ in what they call. Empty if
    none were counted."""

    profiled: bool = False
    """Whether they are of a run on a real GPU, whose counted steps are further ones under a profiler. ``causes`` then have
    no lines, and ``first`` is 0."""
    on_cpu: bool = False
    """Whether they are of a run on a CPU, whose counted steps are further ones behind the timed steps. ``first`` is then the
    number of steps of the warm-up and of timed ones."""

    def __post_init__(self) -> None:
        if self.steps and max(self.steps) >= len(self.kinds):
            raise ValueError(f"a step is of kind {max(self.steps)}, and there are {len(self.kinds)} kinds, from 0")

    @property
    def usual_kind(self) -> int:
        """The most frequent kind of step; of equally frequent ones the latest."""
        return max(reversed(self.steps), key=self.steps.count)

    def per_step(self, name: CountFigure) -> float:
        """Return one figure of a timed step: the mean of all of them, or of those whose calls of Python were counted."""
        figures = [self.kinds[kind].figure(name) for kind in self.steps]
        if name == "python_calls":
            figures = list(filter(None, figures))
        return sum(figures) / len(figures) if figures else 0.0

    @property
    def figures(self) -> tuple[CountFigure, ...]:
        """The figures that a run on this kind of device has."""
        if self.on_cpu:
            return (*_ON_A_CPU_ONLY, *_ON_BOTH)
        if self.profiled:
            return _PROFILED
        return tuple(figure for figure in COUNT_FIGURES if figure not in (*_ON_A_CPU_ONLY, "kernels"))

    @property
    def launches_graphs(self) -> bool:
        """Whether any step launches CUDA graphs, so that the GPU does another number of tasks than the host asks for."""
        return any(kind.replays for kind in self.kinds)

    def of_step(self, index: int) -> StepCounts:
        """Return the figures of timed step ``index``, from 0."""
        return self.kinds[self.steps[index]]

    def as_stored(self) -> Counts:
        """Return the counts as baselines keep them: without numbers of lines, which move, and without names of kernels and
        operators."""
        stored = (
            msgspec.structs.replace(
                cause,
                by="" if cause.what in ("launches", "kernels", "operators") else cause.by,
                own=_without_line(cause.own),
                library=_without_line(cause.library),
                # The bytes of launches are numbers of blocks, which are not stored by line.
                bytes=cause.bytes if cause.what != "launches" else (),
            )
            for cause in self.causes
        )
        return msgspec.structs.replace(self, causes=added_up(stored), others=())


MOST_CAUSES: Final = 500
"""The most causes that are kept. The smallest of the others are added up, by what is counted."""


def added_up(causes: Iterable[CountCause]) -> tuple[CountCause, ...]:
    """Return the causes, with one cause in place of several that differ only in their counts. All have the same kinds of
    steps."""
    alike: defaultdict[CountCause, list[CountCause]] = defaultdict(list)
    for cause in causes:
        alike[msgspec.structs.replace(cause, counts=(), bytes=())].append(cause)
    sums = []
    for key, rows in alike.items():
        counts = tuple(map(sum, zip(*(row.counts for row in rows), strict=True)))
        sizes = tuple(map(sum, zip(*(row.bytes or (0,) * len(counts) for row in rows), strict=True)))
        sums.append(msgspec.structs.replace(key, counts=counts, bytes=sizes if any(sizes) else ()))
    return tuple(sums)


def _without_line(place: Place | None) -> Place | None:
    return None if place is None else msgspec.structs.replace(place, line=0)
