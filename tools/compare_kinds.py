"""The memory of every declared case of a platform, of three kinds: predicted, emulated and published.

    python tools/compare_kinds.py [--write] [--all] [PLATFORM ...]

reads what is recorded below baselines/predicted and baselines/emulated (``pytest benchmarks -m PLATFORM --gpu-predict
--gpu-baseline-update`` and the same with ``--gpu-emulate``), and prints Markdown for each platform: a summary, the cases
that are published or more than 0.1 % apart, and the cases that have a figure of one kind only, with the reason.
``--write`` writes docs/emulation-accuracy.md. Exits with 1 where a goal is missed: allocated bytes predicted within 0.1 % of
the emulated ones for eager cases of one GPU, within 1 % for sharded ones.
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
from pytest_gputrain.storage.published import GATED, PublishedStore
from pytest_gputrain.storage.recorded import EmulationStore, PredictionStore
from pytest_gputrain.utils.markdown import table
from pytest_gputrain.utils.units import GiB, format_percent

BASELINES: Final = Path(__file__).resolve().parent.parent / "baselines"
PAGE: Final = BASELINES.parent / "docs" / "emulation-accuracy.md"
HEADERS: Final = (
    "case",
    "predicted",
    "emulated",
    "predicted against emulated",
    "published, in use",
    "predicted against published",
    "emulated against published",
)
PREAMBLE: Final = """# Predicted, emulated and published memory

This page shows how far you can trust figures without a GPU. It compares the memory of each case of the suites by a
[prediction](predict.md), which follows rules on fake tensors, by an [emulated GPU](emulated-gpu.md), which runs torch's own
CUDA operators and allocator, and as published. The goal for allocated memory is that prediction and emulation differ by at
most 0.1 % on one GPU and 1 % on several GPUs, for cases without `torch.compile`.

Memory is in GiB: allocated / reserved at the peak. Published figures are memory in use on the device, which is reserved
memory plus CUDA's context. The tables have the cases with a published figure, and those whose allocated memory differs by
more than 0.1 %. The published rows of PanGu with DeepSpeed were measured with an older version, and needed more memory:
[what is known](deepspeed-zero.md#buckets). `python tools/compare_kinds.py --write` writes this page.
"""
_EQUAL: Final = 0.000005
EAGER_GOAL: Final = 0.001
SHARDED_GOAL: Final = 0.01
_COMPILED: Final = "because torch decides what compiled code keeps in memory while it compiles"


class Row(NamedTuple):
    """A case of a platform and its figures; None where there is none of a kind."""

    case: Case
    predicted: Prediction | None
    emulated: EmulatedRun | None
    published: Figure | None
    """Memory in use on the device."""

    @property
    def error(self) -> float | None:
        """Return the error of the prediction, if both kinds fit and nothing is compiled."""
        if self.predicted is None or self.emulated is None or not (self.predicted.fits and self.emulated.fits):
            return None
        return self.predicted.peak_allocated_bytes / self.emulated.peak_allocated_bytes - 1

    @property
    def reserved_error(self) -> float | None:
        """Return that of reserved bytes, or None."""
        if self.error is None or self.predicted is None or self.emulated is None or not self.predicted.peak_reserved_bytes:
            return None
        return self.predicted.peak_reserved_bytes / self.emulated.peak_reserved_bytes - 1

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
                before.figures[-1] if before else None,
                after.figures[-1] if after else None,
                figures.device_used_bytes if figures else None,
            )


def line(row: Row) -> list[str]:
    """Return the cells of a row, in the order of the headers."""
    cells = [str(row.case)]
    for figures in (row.predicted, row.emulated):
        if figures is None:
            cells.append("")
        elif not figures.fits:
            cells.append("out of memory")
        else:
            reserved = figures.peak_reserved_bytes
            cells.append(
                f"{figures.peak_allocated_bytes / GiB:.2f}" + ("" if reserved is None else f" / {reserved / GiB:.2f}")
            )
    cells.append("" if row.error is None else _share(row.error))
    published = row.published
    cells.append("" if published is None else f"{published.low / GiB:.1f}")
    return cells + ["" if published is None else _against(used, published) for used in _used(row)]


def _share(error: float) -> str:
    return "equal" if abs(error) < _EQUAL else f"{100 * error:+.3f} %"


def _used(row: Row) -> Iterator[float | None]:
    """Yield the memory in use on the device, predicted and emulated."""
    predicted, emulated = row.predicted, row.emulated
    reserved = predicted.peak_reserved_bytes if predicted is not None and predicted.fits else None
    yield None if reserved is None or predicted is None else reserved + predicted.target.context_bytes
    yield emulated.device_used_bytes if emulated is not None and emulated.fits else None


def _against(used: float | None, published: Figure) -> str:
    return "" if used is None else format_percent(used / published.low - 1)


def alone(every: Iterable[Row], platform: str) -> Iterator[str]:
    """Yield each reason why cases have a figure of one kind only, with the cases."""
    why: dict[str, list[str]] = {}
    for row in every:
        if row.emulated is None:
            why.setdefault(f"predicted only, {_why_not_emulated(row.case, platform)}", []).append(f"`{row.case}`")
        elif row.predicted is None:
            reason = _COMPILED if row.case.compile != "off" else "no prediction is recorded"
            why.setdefault(f"emulated only, {reason}", []).append(f"`{row.case}`")
    for reason, cases in why.items():
        yield f"{len(cases)} {reason}: {', '.join(cases)}"


def _why_not_emulated(case: Case, platform: str) -> str:
    if case.servers:
        return "because parameter servers would have to answer, and only the first process runs"
    return f"because no run of `pytest benchmarks -m {platform} --gpu-emulate --gpu-baseline-update-new-only` is recorded"


def summary(every: Sequence[Row]) -> Iterator[str]:
    """Yield what is true of each group of cases."""
    for what, among in (
        ("one GPU", [row for row in every if row.case.gpus == 1 and row.case.compile == "off"]),
        ("several GPUs", [row for row in every if row.case.gpus > 1 and row.case.compile == "off"]),
    ):
        errors = [abs(row.error) for row in among if row.error is not None]
        if not errors:
            continue
        equal, missed, apart = (
            sum(error < _EQUAL for error in errors),
            sum(row.missed for row in among),
            sum(row.disagree for row in among),
        )
        yield (
            f"Allocated memory of {len(errors)} cases of {what} without torch.compile: {equal} are equal, and the others "
            f"differ by at most {100 * max(errors):.3f} %; {missed} miss the goal of {100 * among[0].goal:g} %. For "
            f"{apart} cases, prediction and emulation disagree on whether they fit"
        )
        reserved = sorted((abs(error), str(row.case)) for row in among if (error := row.reserved_error) is not None)
        middle, (most, case) = statistics.median(error for error, _ in reserved), reserved[-1]
        yield (
            f"Reserved memory of these cases differs by {100 * middle:.1f} % in the median, and at most by "
            f"{100 * most:.1f} % ({case})"
        )
    for number, kind in enumerate(("Predicted", "Emulated")):
        pairs = [(list(_used(row))[number], row.published) for row in every if row.published is not None]
        errors = [abs(used / published.low - 1) for used, published in pairs if used is not None]
        if errors:
            middle, most = 100 * statistics.median(errors), 100 * max(errors)
            yield (
                f"{kind} memory differs from {len(errors)} published figures by {middle:.1f} % in the median, and at most "
                f"by {most:.1f} %"
            )


def section(platform: str, every: Sequence[Row], *, full: bool) -> Iterator[str]:
    """Yield the lines of Markdown about one platform."""
    shown = [row for row in every if full or row.disagree or row.published is not None or abs(row.error or 0) > EAGER_GOAL]
    yield from (f"## {platform}", "", *(f"- {text}." for text in summary(every)), "")
    if shown:
        yield from table(HEADERS, map(line, shown))
        yield ""
    yield from (f"- {text}." for text in alone(every, platform))


def page(platforms: Iterable[str], folder: Path) -> str:
    """Return docs/emulation-accuracy.md."""
    lines = [PREAMBLE]
    for platform in platforms:
        lines += [*section(platform, list(rows(platform, folder)), full=False), ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("platforms", nargs="*", metavar="PLATFORM", help="default: all that are emulated")
    parser.add_argument("--baseline-dir", type=Path, default=BASELINES, metavar="DIR")
    parser.add_argument("--all", action="store_true", help="print all cases")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    arguments = parser.parse_args()
    folder = arguments.baseline_dir
    if arguments.write:
        PAGE.write_text(page(emulated_platforms(folder), folder))
    missed = False
    for platform in arguments.platforms or emulated_platforms(folder):
        every = list(rows(platform, folder))
        if not every:
            parser.error(f"nothing of {platform} is recorded in {folder}")
        missed = missed or any(row.missed or row.disagree for row in every)
        if not arguments.write:
            print("\n".join(section(platform, every, full=arguments.all)))
    return 1 if missed else 0


def emulated_platforms(folder: Path) -> list[str]:
    """Return the platforms of which runs on an emulated GPU are recorded."""
    return sorted(path.name for path in (folder / "emulated").glob("*"))


if __name__ == "__main__":
    sys.exit(main())
