"""Runs the command ``gputrain predict``: does a model fit a GPU, by which method, and up to which batch?"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from pytest_gputrain.cases import sweep
from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.cases.model_config import language_only, quantised_by, with_model
from pytest_gputrain.cases.validation import SIZES
from pytest_gputrain.gate.fit import ERROR
from pytest_gputrain.gate.messages import count
from pytest_gputrain.hardware.catalog import PLATFORMS
from pytest_gputrain.hardware.lease import emulated_gpus
from pytest_gputrain.records import Case
from pytest_gputrain.records.case import IN_EVERY_ID, KNOBS
from pytest_gputrain.records.fit import FitGpu, FitReport
from pytest_gputrain.report import fit, json_report
from pytest_gputrain.report.html import fit as html
from pytest_gputrain.session.fit_engines import EmulatedCells
from pytest_gputrain.session.fitting import Fitting, computes_token_by_token, possible, seconds_of
from pytest_gputrain.storage.hub_cache import cached_models, hub_cache, snapshot
from pytest_gputrain.utils import console
from pytest_gputrain.utils.errors import BadCase, CannotEmulate
from pytest_gputrain.utils.files import write_atomically
from pytest_gputrain.utils.suggest import did_you_mean

_KNOBS: Final = {
    "method": ("method", "full, lora, qlora, ... (default: each of these three that the model has)"),
    "batch": ("batch_size", "samples per step on each GPU (default: 1)"),
    "sequence": ("sequence_length", "tokens of a sample (default: 2048)"),
    "precision": ("precision", "fp32, bf16, bf16-amp or fp16-amp (default: bf16)"),
    "optimizer": ("optimizer", "adamw, adamw-fused, sgd, ... (default: adamw)"),
    "checkpointing": (
        "activation_checkpointing",
        "true, false, or the share of blocks that are recomputed (default: false)",
    ),
    "parallel": ("parallel", "single, ddp, fsdp, zero1, zero2, zero3, ... (default: single)"),
    "gpus": ("gpus", "the number of GPUs that train together (default: 1)"),
}
"""Options with the knobs that they set, and what they say of them."""

_METHODS: Final[tuple[str, ...]] = ("full", "lora", "qlora")
_SEQUENCE: Final = "2048"
_DEFAULTS: Final = Case()
_LANGUAGE: Final = ("language", "vision_language")
"""Families whose cases have a loss to choose."""
_MOST_CELLS: Final = 2000
_TIMEOUT_SECONDS: Final = 600.0
_SECONDS_BETWEEN_LINES: Final = 20.0


def add_to(commands: Any) -> None:
    predict = commands.add_parser(
        "predict",
        help="predict whether a model fits a GPU, by which method, and up to which batch",
        description="Predict the memory of training a model on GPUs, and how long a step may take. The GPUs need not be "
        "here, because the training runs on emulated ones, which compute nothing. Each option takes several values, "
        "separated by commas, and all combinations are run. The exit status is 0 whether anything fits or not, and 2 for "
        "bad input. Example: gputrain predict llama-3.1-8b --method lora,qlora --gpu rtx_4090",
    )
    predict.add_argument(
        "model",
        metavar="MODEL",
        help="a built-in model, a config.json or its folder, or a model in the local cache of the hub",
    )
    predict.add_argument(
        "--gpu", required=True, metavar="MARKER,...", help="the GPUs, as h100,rtx_4090 (pytest --markers lists all)"
    )
    for option, (knob, text) in _KNOBS.items():
        predict.add_argument(f"--{option}", dest=knob, metavar="A,B", help=text)
    predict.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KNOB=A,B",
        help="any other field of a case with its values, as resolution=512x512; may be repeated",
    )
    predict.add_argument(
        "--only-cells",
        action="store_true",
        help="do not search for the largest batches, or for changes that make the others fit",
    )
    predict.add_argument(
        "--sort",
        choices=("speed",),
        default="",
        help="sort the expected times by tokens or samples a second, and say which GPUs cannot be told apart",
    )
    predict.add_argument("--json", type=Path, metavar="FILE", help="write the whole answer to this JSON file")
    predict.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables to this Markdown file")
    predict.add_argument(
        "--html", type=Path, metavar="FILE", help="write the answer to this HTML file, with everything inside"
    )


def main(options: argparse.Namespace) -> int:
    """Print the tables. Return 0, or 2 for bad input."""
    try:
        if options.html is not None and (lacking := html.missing()):
            raise ValueError(f"--html: {lacking}")
        base = _model(options.model, _DEFAULTS.part)
        gpus = _gpus(options.gpu)
        axes = dict(sweep.parse_axes(_knobs(options, base), ()))
        if wrong := {"model", sweep.PLATFORMS} & axes.keys():
            raise ValueError(
                f"--set {min(wrong)} is not accepted; give the model as the first argument, and the GPUs with --gpu"
            )
        # `batch_size` is the last axis, so that rows that differ only in it stand below each other.
        axes = {knob: axes[knob] for knob in sorted(axes, key="batch_size".__eq__)}
        named = tuple(knob for knob, values in axes.items() if len(values) > 1 and knob not in IN_EVERY_ID)
        parts = set(axes.get("part", (_DEFAULTS.part,))) & {*KNOBS["part"].words}
        bases = {part: _model(options.model, part) for part in parts}
        cases = [
            bases.get(knobs.get("part", _DEFAULTS.part), base).replace(**knobs, named=named)
            for knobs in sweep.combinations(tuple(axes.items()))
        ]
        if len(cases) * len(gpus) > _MOST_CELLS:
            raise ValueError(f"{len(cases) * len(gpus):,} combinations are too many; ask for at most {_MOST_CELLS:,}")
        report = _answer(
            options,
            base.model.partition("#")[0],
            cases,
            gpus,
            axes,
            (*_about(options.model, alone=_DEFAULTS.part in bases), *_known_errors(cases)),
        )
        write(options, report)
    except (ValueError, BadCase, CannotEmulate) as error:
        console.say(error)
        return 2
    except OSError as error:
        console.say(f"{error.filename or 'a file'} cannot be written: {error.strerror}")
        return 2
    console.put(fit.text(report, "terminal"), end="")
    return 0


def _model(name: str, part: str) -> Case:
    """Return the case of a model of the zoo, or of a config in a file, in a folder, or in the cache of the hub.

    Args:
        part: the networks of it that train, as a case has it.

    Raises:
        ValueError: there is no such model; one sentence.
        BadCase: it cannot be trained here.
    """
    zoo = architectures()
    if name in zoo:
        return Case(model=name)
    path = _path(name)
    if path is None:
        raise ValueError(_unknown(name))
    try:
        return with_model(Case(model=str(path.absolute()), part=part), Path.cwd())
    except BadCase as error:
        raise ValueError(error.reason) from None


def _path(name: str) -> Path | None:
    """Return the file or folder of that name, or the model's folder in the cache of the hub; None if there is neither."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else snapshot(name, os.environ)
    except (OSError, RuntimeError, ValueError):  # No file can have this name.
        return None


def _unknown(name: str) -> str:
    """Say that there is no such model, and which one may be meant."""
    zoo = architectures()
    # Models on the hub have an organisation and capitals in their names, and built-in models do not.
    near = did_you_mean(name, cached_models(os.environ)) or did_you_mean(name.rpartition("/")[2].lower(), zoo)
    known = "" if near else f"; the built-in models are {', '.join(zoo)}"
    return (
        f"the model {name!r} is unknown{near}: it is not a file, a folder, or a model in the local cache of "
        f"the hub ({hub_cache(os.environ)}){known}"
    )


def _gpus(text: str) -> list[str]:
    """Return the GPUs that the user has named, by their markers or as ``RTX 4090``."""
    names = (re.sub(r"[\s-]+", "_", part.strip().lower()) for part in text.split(","))
    markers = list(dict.fromkeys(filter(None, names)))
    for marker in markers:
        if marker not in PLATFORMS:
            raise ValueError(
                f"the GPU {marker!r} is unknown{did_you_mean(marker, PLATFORMS)}; known: {', '.join(PLATFORMS)}"
            )
    if not markers:
        raise ValueError(f"--gpu names none; give some of {', '.join(PLATFORMS)}")
    return markers


def _knobs(options: argparse.Namespace, base: Case) -> str:
    """Return all knobs in the form that `sweep.parse_axes` takes.

    Raises:
        ValueError: one that the model needs is missing.
    """
    architecture = architectures()[base.model]
    methods = [method for method in _METHODS if method in architecture.trainable] or [*architecture.trainable]
    lines = [f"{knob}={values}" for knob, _ in _KNOBS.values() if (values := getattr(options, knob)) is not None]
    lines += options.set
    given = {line.partition("=")[0].strip() for line in lines}
    if "method" not in given:
        lines.insert(0, f"method={','.join(methods)}")
    needed = {*architecture.needs} - given
    if "sequence_length" in needed:
        lines.append(f"sequence_length={_SEQUENCE}")
    if lacking := [f"--set {knob}={SIZES[knob].size}" for knob in SIZES if knob in needed - {"sequence_length"}]:
        raise ValueError(f"{base.model.partition('#')[0]} has inputs whose size you choose; add {' '.join(lacking)}")
    if "loss" not in given and architecture.family in _LANGUAGE and architecture.trained_part.library == "transformers":
        lines.append("loss=fp32")  # transformers and its Trainer compute the loss in fp32.
    return "\n".join(lines)


def _answer(
    options: argparse.Namespace,
    model: str,
    cases: list[Case],
    gpus: list[str],
    axes: dict[str, tuple[Any, ...]],
    about: tuple[str, ...],
) -> FitReport:
    """Run each combination of a case and a GPU on an emulated GPU, and return which of them fit.

    Args:
        about: sentences about the model.

    Raises:
        ValueError: none of the combinations can be, or none has figures.
        CannotEmulate: no GPU can be emulated here.
    """
    asked, left_out = possible(cases, gpus)
    if not asked:
        raise ValueError("; ".join(left_out))
    engine = EmulatedCells(gpus, Path.cwd(), _TIMEOUT_SECONDS, os.environ, _cache_folder())
    processes = emulated_gpus()
    further = not options.only_cells
    seconds = seconds_of(asked, processes, further=further)
    console.say(f"{count(len(asked), 'combination')} on {count(processes, 'core')} may take about {seconds:.0f} s")
    if any(computes_token_by_token(case) for case, _ in asked):
        console.say(f"each run takes minutes, because transformers computes {model} one token after the other")
    with _progress() as note, contextlib.closing(Fitting(engine, processes, note)) as fitting:
        cells = fitting.cells(asked, remedies=further)
        largest = fitting.largest(cells) if further else []
    figures = [cell.figures for cell in cells if cell.figures is not None]
    if not figures:
        raise ValueError("; ".join(dict.fromkeys(cell.failure for cell in cells)))
    return FitReport(
        generator=json_report.generator(),
        model=model,
        gpus=tuple(FitGpu(marker=gpu, title=engine.titles[gpu], memory_bytes=PLATFORMS[gpu].usable_bytes) for gpu in gpus),
        error=ERROR,
        knobs=_telling(axes),
        sort=options.sort,
        packages={name: version for given in figures for name, version in given.packages.items()},
        cells=tuple(cells),
        largest=tuple(largest),
        left_out=tuple(left_out),
        about=about,
    )


def _about(name: str, *, alone: bool) -> tuple[str, ...]:
    """Return sentences on which model was taken, and on ignored keys of its config that change memory.

    Args:
        alone: whether the language model trains alone.
    """
    if name in architectures():
        both = Path(name).exists()
        return (f"{name} is the built-in model; give ./{name} for the file or folder of that name",) if both else ()
    path = _path(name)
    if path is None:
        return ()
    about = []
    if alone and language_only(path):
        about.append(f"language model only: what {name} has for images or sounds is not counted")
    if packing := quantised_by(path):
        about.append(
            f"the quantization_config of {name} ({packing}) is ignored: full and lora keep the weights in the type of the "
            "precision, and qlora packs them as NF4"
        )
    return tuple(about)


def _known_errors(cases: list[Case]) -> tuple[str, ...]:
    """Return sentences on programs that are known to need more memory than these cases."""
    about = []
    if any(
        case.optimizer == "adamw_8bit" and case.method == "full" and architectures()[case.model].family in _LANGUAGE
        for case in cases
    ):
        about.append(
            'transformers\' Trainer keeps the states of embeddings in fp32 (optim="adamw_bnb_8bit"): add 6 bytes for each '
            "of their elements to the memory of adamw_8bit"
        )
    if any(case.parallel.startswith("zero") for case in cases):
        about.append(
            "the error is larger with ZeRO: these figures are 24 to 61 % below nine published ones of DeepSpeed 0.8.2, for "
            "a reason that is not known"
        )
    return tuple(about)


def _telling(axes: dict[str, tuple[Any, ...]]) -> tuple[str, ...]:
    """Return the knobs in which the cells differ, with the batch size last."""
    several = [knob for knob, values in axes.items() if len(values) > 1 and knob != "batch_size"]
    return (*(several or ["method"]), "batch_size")


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "pytest-gputrain-predictions"


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Provide a progress report: a bar on a terminal, and else a line from time to time."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.console import Console
    from rich.progress import Progress, TaskID, TimeElapsedColumn

    with Progress(
        *Progress.get_default_columns(), TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as progress:
        bars: dict[str, TaskID] = {}

        def note(what: str, done: int, total: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=total)
            progress.update(bars[what], completed=done)

        yield note


def _lines() -> Callable[[str, int, int], None]:
    """Return a function that prints how much is done and how long the rest takes, if its last line is old enough."""
    said = time.monotonic()
    begun: dict[str, float] = {}

    def note(what: str, done: int, total: int) -> None:
        nonlocal said
        now = time.monotonic()
        took = now - begun.setdefault(what, now)
        if now - said >= _SECONDS_BETWEEN_LINES and done:
            said = now
            left = f", the others may take about {took * (total - done) / done:.0f} s" if done < total else ""
            console.say(f"{done} of {total} {what} are done after {took:.0f} s{left}")

    return note


def write(options: argparse.Namespace, report: FitReport) -> None:
    """Write the answer to the files that the options name."""
    if options.json is not None:
        write_atomically(options.json, msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if options.markdown is not None:
        write_atomically(options.markdown, fit.text(report, "markdown").encode())
    if options.html is not None:
        write_atomically(options.html, html.page(report).encode())
