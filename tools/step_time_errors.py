#!/usr/bin/env python3
"""Compares the seconds that are expected of steps with those that were measured, and fits the rates of the H200 to them.

    tools/step_time_errors.py                   # prints the errors, each step left out of the fit in turn
    tools/step_time_errors.py --record h200     # emulates the measured cases anew, and writes their calls

The calls of the steps, once recorded, are in tests/step_calls/: recording them takes a CUDA build of torch, printing does
not.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy

from pytest_gputrain.hardware.catalog import title_of
from pytest_gputrain.hardware.rates import rates_of
from pytest_gputrain.hardware.step_time import expected_time
from pytest_gputrain.records import Case, ExpectedTime, Rates, TracedCall
from pytest_gputrain.utils.units import format_seconds

ROOT: Final = Path(__file__).parent.parent
CALLS: Final = ROOT / "tests" / "step_calls"
_TIMEOUT_SECONDS: Final = 1800


class Step(NamedTuple):
    """A step that was measured, and is to be foretold."""

    source: str
    """The report or the published table that has its time."""
    name: str
    platform: str
    case: Case
    seconds: float
    """The median of the measured steps."""
    calls: tuple[TracedCall, ...] = ()


def measured_on_h200() -> Iterator[Step]:
    """Yield the timed cases of docs/h200, each once."""
    seen = set()
    for file in sorted((ROOT / "docs/h200/reports").glob("*.json")):
        for result in json.loads(file.read_text())["results"]:
            for reply in result.get("replies") or []:
                if reply and reply.get("outcome") == "measured" and result["key"] not in seen:
                    seen.add(result["key"])
                    case = msgspec.convert(result["case"], Case)
                    yield Step("h200", result["key"], "h200", case, statistics.median(reply["step_seconds"]))


def published() -> Iterator[Step]:
    """Yield the rows of baselines/published that a single GPU has run in PyTorch."""
    for file in sorted((ROOT / "baselines/published").glob("*.json")):
        table = json.loads(file.read_text())
        for number, row in enumerate(table["rows"]):
            figures = row["figures"].get("pytorch") or {}
            case = msgspec.convert(row["case"], Case)
            seconds = _published_seconds(figures, case)
            if row["outcome"] == "measured" and case.gpus == 1 and seconds:
                yield Step(table["name"], f"{case}#{number}", row["platform"], case, seconds)


def _published_seconds(figures: dict[str, Any], case: Case) -> float:
    middle = {name: (figure["low"] + figure["high"]) / 2 for name, figure in figures.items()}
    if "step_seconds" in middle:
        return middle["step_seconds"]
    if "update_seconds" in middle:
        return middle["update_seconds"] / case.gradient_accumulation
    rate = middle.get("samples_per_second_per_gpu") or middle.get("samples_per_second")
    return case.batch_size / rate if rate else 0.0


SOURCES: Final = {"h200": measured_on_h200, "published": published}


def record(source: str, only: str) -> None:
    """Emulate the cases of a source, and write the calls of their steps. Steps of one name make the same calls."""
    steps = {(step.name, step.platform): step for step in read(source)} if _file(source).exists() else {}
    for step in SOURCES[source]():
        if only not in step.name or (not only and (step.name, step.platform) in steps):
            continue
        alike = (known.calls for known in steps.values() if known.name == step.name and known.platform != step.platform)
        if calls := next(alike, ()) or _emulated(step):
            steps[step.name, step.platform] = step._replace(calls=calls)
            print(f"{step.name} on {step.platform}: {len(calls)} distinct calls", flush=True)
            lines = [msgspec.json.encode(steps[key]) for key in sorted(steps)]
            _file(source).write_bytes(gzip.compress(b"\n".join(lines), mtime=0))


def _emulated(step: Step) -> tuple[TracedCall, ...]:
    """Return the calls of a step on an emulated GPU; none if it cannot be run there."""
    from pytest_gputrain.execution.emulated import EmulatingExecutor
    from pytest_gputrain.session.tasks import full_size_task

    steps = min(2, step.case.gradient_accumulation)  # of which the last one adds to gradients, and updates
    case = step.case.replace(steps=1, warmup=1, gradient_accumulation=steps, loader_workers=0)
    task = full_size_task(case, ROOT, step.platform)
    environ = EmulatingExecutor(step.platform, _TIMEOUT_SECONDS, os.environ, None).environment(1)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "case.json").write_bytes(msgspec.json.encode(task))
        Path(folder, "rank0").mkdir()
        command = [sys.executable, __file__, "--inside", folder]
        subprocess.run(command, env=environ, timeout=_TIMEOUT_SECONDS, check=False)
        found = Path(folder, "calls.json")
        if found.exists():
            return msgspec.json.decode(found.read_bytes(), type=tuple[TracedCall, ...])
        print(f"{step.name}: {Path(folder, 'rank0', 'reply.json').read_text()[:500]}", flush=True)
        return ()


def _inside(folder: Path) -> None:
    """Run the case of a folder in this process, and write the calls of the step that is counted."""
    from pytest_gputrain.worker import emulated
    from pytest_gputrain.worker.__main__ import main as run_worker

    def expected_and_written(calls: Sequence[TracedCall], *args: Any, **kwargs: Any) -> Any:
        (folder / "calls.json").write_bytes(msgspec.json.encode(calls))
        return expected_time(calls, *args, **kwargs)

    emulated.expected_time = expected_and_written
    run_worker(folder, 0)


def _file(source: str) -> Path:
    return CALLS / f"{source}.jsonl.gz"


def read(source: str) -> list[Step]:
    """Read the recorded steps of a source."""
    return [msgspec.json.decode(line, type=Step) for line in gzip.decompress(_file(source).read_bytes()).splitlines()]


class _Prior(NamedTuple):
    """What is believed of rates before any step of the H200 is looked at, and how surely."""

    kinds: dict[str, float]
    spread: float
    """Standard deviation of the logarithm of a common factor."""


PRIORS: Final = (
    _Prior({"products_16bit": 0.72}, 0.10),
    _Prior({"products_fp32": 0.70}, 0.25),
    _Prior({"attention_cudnn": 0.68, "attention_cudnn_backward": 0.57}, 0.15),
    _Prior({"pointwise": 0.85, "reductions": 0.64, "gathers": 0.42, "thin_products": 0.55}, 0.10),
    _Prior({"convolutions_16bit": 0.45}, 0.5),
    _Prior({"convolutions_tf32": 0.40}, 0.5),
    _Prior({"call_us": 15.0}, 0.3),
)
"""Those that are fitted, each group by one factor. The first and the third are public: tables of products in XLA, and of
attention in cudnn-frontend. The others are guesses."""
_NOISE: Final = {True: 0.25, False: 0.08}
"""The standard deviation of the logarithm of a step's time, by whether the host is what it waits for."""


def with_factors(rates: Rates, factors: Sequence[float]) -> Rates:
    """Return the rates with those of each group of `PRIORS` set to its priors times e to the power of its factor."""
    kinds = dict(rates.kinds)
    for prior, factor in zip(PRIORS, factors, strict=True):
        kinds |= {name: value * math.exp(factor) for name, value in prior.kinds.items()}
    return msgspec.structs.replace(rates, kinds=kinds)


def expected(step: Step, rates: Rates) -> ExpectedTime:
    """Return what is expected of a step."""
    case = step.case
    offloads = case.offload_optimizer or case.offload_param
    return expected_time(
        step.calls, rates, accumulation=case.gradient_accumulation, lacking="it offloads to the host" if offloads else ""
    )


class Fit:
    """The fit of the rates to measured steps, by least squares of logarithms."""

    def __init__(self, steps: Sequence[Step], rates: Rates) -> None:
        self._rates = rates
        self.factors = numpy.zeros(len(PRIORS))
        for _ in range(4):
            residuals, slopes = self._residuals(steps)
            self.factors -= numpy.linalg.lstsq(slopes, residuals, rcond=None)[0]
        self._steps, self._at_end = list(steps), self._residuals(steps)

    def _residuals(self, steps: Sequence[Step]) -> tuple[Any, Any]:
        """Return the errors of steps and priors, each by its standard deviation, and their slopes by factor."""
        rows, slopes = [], []
        for step in steps:
            estimate = expected(step, with_factors(self._rates, self.factors))
            noise = _NOISE[estimate.host_bound]
            rows.append(math.log(estimate.seconds / step.seconds) / noise)
            slope = []
            for place in range(len(PRIORS)):
                moved = self.factors.copy()
                moved[place] += 0.01
                higher = expected(step, with_factors(self._rates, moved))
                slope.append(math.log(higher.seconds / estimate.seconds) / 0.01 / noise)
            slopes.append(slope)
        spreads = numpy.array([prior.spread for prior in PRIORS])
        return numpy.array([*rows, *self.factors / spreads]), numpy.array([*slopes, *numpy.diag(1 / spreads)])

    def without(self, names: Collection[str]) -> Rates:
        """Return the rates that are fitted to all steps but these, by one further step of the fit."""
        residuals, slopes = self._at_end
        kept = [
            place for place in range(len(residuals)) if place >= len(self._steps) or self._steps[place].name not in names
        ]
        factors = self.factors - numpy.linalg.lstsq(slopes[kept], residuals[kept], rcond=None)[0]
        return with_factors(self._rates, factors)


def family(step: Step) -> str:
    """Return the family of models that a step belongs to; full fine-tuning and LoRA of Llama are two."""
    return f"{step.case.model} {step.case.method}" if step.case.model.startswith("llama") else step.case.model


class Error(NamedTuple):
    """How far the estimates of a step are off, as ratios to the measured time less one."""

    step: Step
    estimate: ExpectedTime
    """With the rates of rates.toml."""
    left_out: float
    """With rates fitted to all other steps."""
    family_left_out: float
    """With rates fitted to the steps of other families of models."""


def errors_on_h200() -> list[Error]:
    """Return the errors of the timed cases of docs/h200."""
    steps, rates = read("h200"), rates_of("h200")
    assert rates is not None
    fit = Fit(steps, rates)

    def error(step: Step, rates: Rates) -> float:
        return expected(step, rates).seconds / step.seconds - 1

    return [
        Error(
            step,
            expected(step, rates),
            error(step, fit.without({step.name})),
            error(step, fit.without({other.name for other in steps if family(other) == family(step)})),
        )
        for step in steps
    ]


def summary(errors: Sequence[float]) -> str:
    """Return a row of a table of errors: how many, their median, the worst, and how many are within 10 and 20 %."""
    sizes = sorted(map(abs, errors))
    within = (sum(size <= limit for size in sizes) / len(sizes) for limit in (0.1, 0.2))
    return "| {} | {:.1%} | {:.0%} | {:.0%} | {:.0%} |".format(
        len(sizes), statistics.median(sizes), sizes[-1], *within
    ).replace("%", " %")


def rows(errors: Sequence[Error]) -> list[str]:
    """Return the rows of the two tables in docs/how-true.md; the first has the memory of the steps in further columns."""
    made = []
    for step, _, left_out, family_left_out in errors:
        errors_of_step = " | ".join(f"{100 * error:+.0f}" for error in (left_out, family_left_out))
        made.append(f"| `{step.name}` | {format_seconds(step.seconds)} | {errors_of_step} |")
    bound = [error.estimate.host_bound for error in errors]
    for name, chosen in (("all", [True] * len(errors)), ("GPU-bound", [not one for one in bound]), ("host-bound", bound)):
        few = list(itertools.compress(errors, chosen))
        made.append(f"| {name}, each step left out {summary([error.left_out for error in few])}")
    made.append(f"| all, each family left out {summary([error.family_left_out for error in errors])}")
    return made


def published_rows() -> list[str]:
    """Return the rows of a table of published steps: how many times as long they took as expected."""
    groups: defaultdict[str, list[tuple[Step, Rates]]] = defaultdict(list)
    for step in read("published"):
        if rates := rates_of(step.platform):
            bits = "fp32" if step.case.precision == "fp32" else "16 bits"
            bits += ", ZeRO with offload" if step.case.offload_optimizer else ""
            groups[f"{step.source}, {title_of(step.platform)}, {bits}"].append((step, rates))
    made = []
    for name, steps in sorted(groups.items()):
        estimates = [expected(step, rates) for step, rates in steps]
        inside = sum(
            (one.low or 0) <= step.seconds <= (one.high or 0) for one, (step, _) in zip(estimates, steps, strict=True)
        )
        masked = [expected(_by_masked_efficient_kernel(step), rates) for step, rates in steps]
        ranges = [_range([step for step, _ in steps], kind) for kind in (estimates, masked)]
        made.append(f"| {name} | {len(steps)} | {ranges[0]} | {inside} | {ranges[1]} |")
    return made


def _range(steps: Sequence[Step], estimates: Sequence[ExpectedTime]) -> str:
    known = [step.seconds / one.seconds for step, one in zip(steps, estimates, strict=True) if one.seconds]
    return f"{min(known):.2f} to {max(known):.2f}" if len(known) == len(steps) else "no estimate"


def _by_masked_efficient_kernel(step: Step) -> Step:
    """Return the step as transformers 4.49 runs it if its attention gets a mask: by the kernel that skips no block."""
    calls = []
    for call in step.calls:
        if "attention" in call.operator:
            name = call.operator.replace("cudnn", "efficient").replace("flash", "efficient")
            calls.append(msgspec.structs.replace(call, operator=name, flags=("masked",)))
        else:
            calls.append(call)
    return step._replace(calls=tuple(calls))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", choices=SOURCES)
    parser.add_argument("--only", default="", help="a part of the names of cases")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        _inside(options.inside)
    elif options.record:
        record(options.record, options.only)
    else:
        rates = rates_of("h200")
        assert rates is not None
        fitted = with_factors(rates, Fit(read("h200"), rates).factors)
        print({name: round(fitted.kinds[name], 3) for prior in PRIORS for name in prior.kinds})
        print(*rows(errors_on_h200()), *published_rows(), sep="\n")


if __name__ == "__main__":
    main()
