"""The memory of every declared case of a platform, of three kinds: predicted, emulated and published.

    python tools/compare_kinds.py PLATFORM [--baseline-dir DIR] [--all]

reads what is recorded below baselines/predicted and baselines/emulated (``pytest benchmarks -m PLATFORM --gpu-predict
--gpu-baseline-update`` and the same with ``--gpu-emulate``), and prints Markdown: a table of the cases, those with a figure
of one kind only and why, and a summary. Exits with 1 where a goal is missed: allocated bytes predicted within 0.1 % of the
emulated ones for eager cases of one GPU, within 1 % for sharded ones.

Without ``--all`` the table has only the cases that are more than 0.1 % apart or published.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from pytest_gputrain.records import Case, EmulatedRun, Prediction
from pytest_gputrain.records.published import Figure
from pytest_gputrain.storage.emulations import EmulationStore
from pytest_gputrain.storage.predictions import PredictionStore
from pytest_gputrain.storage.published import GATED, PublishedStore
from pytest_gputrain.utils.markdown import table
from pytest_gputrain.utils.units import GiB, format_percent

BASELINES: Final = Path(__file__).resolve().parent.parent / "baselines"
EAGER_GOAL: Final = 0.001
SHARDED_GOAL: Final = 0.01
_COMPILED: Final = "compiled code cannot be predicted on fakes: torch decides there what it keeps while it compiles"


class Row(NamedTuple):
    """A case of a platform and its figures; None where there is none of a kind."""

    case: Case
    predicted: Prediction | None
    emulated: EmulatedRun | None
    published: Figure | None
    """Memory in use on the device."""

    @property
    def error(self) -> float | None:
        """Of the prediction, where both kinds fit and nothing is compiled."""
        if self.predicted is None or self.emulated is None or not (self.predicted.fits and self.emulated.fits):
            return None
        return self.predicted.peak_allocated_bytes / self.emulated.peak_allocated_bytes - 1

    @property
    def goal(self) -> float:
        return EAGER_GOAL if self.case.gpus == 1 else SHARDED_GOAL

    @property
    def missed(self) -> bool:
        return self.error is not None and self.case.compile == "off" and abs(self.error) > self.goal

    @property
    def disagree(self) -> bool:
        """Whether one kind fits and the other does not."""
        return self.predicted is not None and self.emulated is not None and self.predicted.fits != self.emulated.fits


def rows(platform: str, folder: Path) -> Iterator[Row]:
    """Yield a row for each case of which anything is recorded."""
    predictions, emulations, tables = PredictionStore(folder), EmulationStore(folder), PublishedStore.beside(BASELINES)
    paths = [*(folder / "predicted" / platform).glob("*.json"), *(folder / "emulated" / platform).glob("*.json")]
    for suite in sorted({path.stem for path in paths}):
        predicted, emulated = predictions.suite(platform, suite), emulations.suite(platform, suite)
        for key in sorted({*predicted, *emulated}):
            before, after = predicted.get(key), emulated.get(key)
            row = tables.get(platform, suite, key)
            figures = row.figures.get(GATED) if row is not None and not row.memory_not_judged else None
            case = (after or before).case  # type: ignore[union-attr]
            yield Row(
                case,
                before.predictions[-1] if before else None,
                after.runs[-1] if after else None,
                figures.device_used_bytes if figures else None,
            )


def line(row: Row) -> list[str]:
    predicted, emulated = row.predicted, row.emulated
    cells = [str(row.case)]
    for figures in (predicted, emulated):
        if figures is None:
            cells += ["", ""]
        elif not figures.fits:
            cells += ["out of memory", ""]
        else:
            reserved = figures.peak_reserved_bytes
            cells += [f"{figures.peak_allocated_bytes / GiB:.2f}", "" if reserved is None else f"{reserved / GiB:.2f}"]
    cells.append("" if row.error is None else f"{100 * row.error:+.3f} %")
    cells += ["", "", ""]
    if row.published is not None:
        cells[-3] = f"{row.published.low / GiB:.1f}"
        cells[-2:] = [_against(used, row.published) for used in _used(row)]
    return cells


def _used(row: Row) -> Iterator[float | None]:
    """Yield the memory in use on the device, predicted and emulated."""
    predicted, emulated = row.predicted, row.emulated
    reserved = predicted.peak_reserved_bytes if predicted is not None and predicted.fits else None
    yield None if reserved is None or predicted is None else reserved + predicted.target.context_bytes
    yield emulated.device_used_bytes if emulated is not None and emulated.fits else None


def _against(used: float | None, published: Figure) -> str:
    return "" if used is None else format_percent(used / published.low - 1)


def alone(every: Iterable[Row], platform: str) -> Iterator[list[str]]:
    """Yield the cases that have one kind only, with the reason."""
    for row in every:
        if row.emulated is None:
            yield [str(row.case), "predicted only", _why_not_emulated(row.case, platform)]
        elif row.predicted is None:
            yield [str(row.case), "emulated only", _COMPILED if row.case.compile != "off" else "never predicted"]


def _why_not_emulated(case: Case, platform: str) -> str:
    if case.servers:
        return "its parameter servers have to answer, and the first process runs alone"
    return f"never recorded: pytest benchmarks -m {platform} --gpu-emulate --gpu-baseline-update-new-only"


def summary(every: Sequence[Row]) -> Iterator[str]:
    for what, among in (
        ("eager, one GPU", [row for row in every if row.case.gpus == 1 and row.case.compile == "off"]),
        ("eager, sharded", [row for row in every if row.case.gpus > 1 and row.case.compile == "off"]),
        ("compiled", [row for row in every if row.case.compile != "off"]),
    ):
        errors = [abs(row.error) for row in among if row.error is not None]
        if errors:
            yield (
                f"{what}: {len(errors)} cases, median error {statistics.median(errors):.3%}, worst {max(errors):.3%}, "
                f"{sum(row.missed for row in among)} beyond the goal, {sum(row.disagree for row in among)} whose fit differs"
            )
    for number, kind in enumerate(("predicted", "emulated")):
        pairs = [(list(_used(row))[number], row.published) for row in every if row.published is not None]
        errors = [abs(used / published.low - 1) for used, published in pairs if used is not None]
        if errors:
            yield (
                f"{kind} against published: {len(errors)} figures, median error {statistics.median(errors):.1%}, worst "
                f"{max(errors):.1%}"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platform", metavar="PLATFORM")
    parser.add_argument("--baseline-dir", type=Path, default=BASELINES, metavar="DIR")
    parser.add_argument("--all", action="store_true", help="print all cases")
    arguments = parser.parse_args()
    every = list(rows(arguments.platform, arguments.baseline_dir))
    if not every:
        parser.error(f"nothing of {arguments.platform} is recorded in {arguments.baseline_dir}")
    shown = [
        row
        for row in every
        if arguments.all or row.disagree or row.published is not None or abs(row.error or 0) > EAGER_GOAL
    ]
    headers = ["case", "predicted allocated, GiB", "reserved", "emulated allocated", "reserved", "predicted / emulated - 1"]
    print("\n".join(table([*headers, "published in use", "predicted", "emulated"], map(line, shown))))
    print()
    print("\n".join(table(["case", "kind", "why"], alone(every, arguments.platform))))
    print()
    print("\n".join(f"- {text}" for text in summary(every)))
    return 1 if any(row.missed or row.disagree for row in every) else 0


if __name__ == "__main__":
    sys.exit(main())
