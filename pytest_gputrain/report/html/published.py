"""Prepares the bars of published figures for the HTML page: beside what was measured, or those of whole tables."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from pytest_gputrain.gate.messages import count
from pytest_gputrain.hardware.catalog import title_of
from pytest_gputrain.records import Case, Measured, Published, Result
from pytest_gputrain.records.published import Figure
from pytest_gputrain.report.html.charts import Bar, Charts
from pytest_gputrain.report.html.sections import CaptionedChart, LegendEntry
from pytest_gputrain.report.published import FRAMEWORKS, METRICS, OUTCOMES, Metric, printed
from pytest_gputrain.report.results import latest, of_kind
from pytest_gputrain.storage.published import GATED, PublishedStore, PublishedTable
from pytest_gputrain.utils.units import format_bytes, format_seconds

_HERE: Final = "measured here"
_COLOURS: Final = {"paddle": 2, "pytorch": 1}


def beside_measured(results: Sequence[Result], store: PublishedStore | None, charts: Charts) -> Iterator[CaptionedChart]:
    """Return bars of the printed and the measured values, for every figure of every published table.

    Args:
        store: published rows for results that were not compared with any; None for none.
    """
    pairs_by_table: defaultdict[tuple[str, str], list[tuple[Published, Result]]] = defaultdict(list)
    for result in latest(of_kind(results, Measured)):
        row = result.published
        if row is None and store is not None and result.scale == "full":
            row = store.get(result.platform, result.suite, str(result.case))
            row = row if row is not None and row.case.identity() == result.case.identity() else None
        if row is not None and result.summary is not None:
            pairs_by_table[row.table, row.platform].append((row, result))
    for (table, platform), pairs in pairs_by_table.items():
        for metric in METRICS:
            groups = [group for row, result in pairs if (group := _bars_of(metric, row, result))]
            if not groups:
                continue
            colours = {part[1] for _, bars in groups for bar in bars for part in bar.parts}
            title = f"{table} on {title_of(platform)}: {metric.title}"
            yield CaptionedChart(
                title=title,
                about=_direction(metric),
                chart=charts.bars(groups, title=title, description=_description(groups)),
                legend=tuple(
                    entry
                    for entry in (
                        LegendEntry(text=_HERE, colour=0),
                        *(LegendEntry(text=f"{name}, published", colour=_COLOURS[key]) for key, name in FRAMEWORKS.items()),
                    )
                    if entry.colour in colours
                ),
            )


def _direction(metric: Metric) -> str:
    return "Longer is faster." if metric.field.startswith("samples") else "Shorter is better."


def _bars_of(metric: Metric, row: Published, result: Result) -> tuple[str, list[Bar]] | None:
    value = metric.measured(result)
    printed_by = ((name, row.figures.get(name)) for name in FRAMEWORKS)
    figures = {
        name: figure
        for name, framework_figures in printed_by
        if framework_figures is not None and (figure := getattr(framework_figures, metric.field)) is not None
    }
    if value is None or not figures:
        return None
    bars = [
        Bar(parts=((figure.middle, _COLOURS[name]),), text=f"{printed(metric, figure)} {FRAMEWORKS[name]}")
        for name, figure in figures.items()
    ]
    return str(result.case), [*bars, _measured_bar(metric, value, figures)]


def _measured_bar(metric: Metric, value: float, figures: Mapping[str, Figure]) -> Bar:
    """Return the bar of a measured figure, with its ratio to each published one."""
    ratios = ", ".join(
        f"{value / figure.middle:.2f} x{f' {FRAMEWORKS[name]}' if len(figures) > 1 else ''}"
        for name, figure in figures.items()
        if figure.middle
    )
    shown = format_bytes(value) if metric.field.endswith("_bytes") else f"{value:,.3g}"
    shown = format_seconds(value) if metric.field.endswith("_seconds") else shown
    return Bar(parts=((value, 0),), text=f"{shown} here{f' ({ratios})' if ratios else ''}")


def _description(groups: Sequence[tuple[str, Sequence[Bar]]]) -> str:
    return "; ".join(f"{name}: {', '.join(bar.text for bar in bars)}" for name, bars in groups)


def whole_tables(
    tables: Sequence[PublishedTable], measured: Callable[[Published], Result | None], charts: Charts
) -> Iterator[CaptionedChart]:
    """Return charts of every figure that the tables print. Each group is to be compared: GPUs, frameworks, sizes of buckets.

    Args:
        measured: finds what was measured of a row.
    """
    for table in tables:
        for metric in METRICS:
            drawn = list(_printed_figures(table, metric))
            by_model: defaultdict[str, list[_Printed]] = defaultdict(list)
            for figure in drawn:
                by_model[figure.row.case.model if len(drawn) > _MOST_BARS else ""].append(figure)
            for model, of_model in by_model.items():
                yield _chart_of(table, metric, model, of_model, measured, charts)


_MOST_BARS: Final = 24
"""A table with more has a chart for each model."""
_BUCKETS: Final = {"allgather_bucket_size": "bucket", "stage3_max_live_parameters": "live"}
"""Sizes that cases of a group differ in, and how a bar names them."""
_PALETTE: Final = (1, 2, 3, 5)
_PLAIN: Final = 4
"""The colour of what has no size of buckets, where others have."""


class _Printed(NamedTuple):
    """A figure of a row by one framework; none if the row ran out of memory or failed."""

    row: Published
    framework: str
    figure: Figure | None

    @property
    def sides(self) -> dict[str, str]:
        """Return the properties by which this figure may differ from others of its group."""
        sizes = [(name, size) for knob, name in _BUCKETS.items() if (size := getattr(self.row.case, knob))]
        return {
            "platform": title_of(self.row.platform),
            "framework": FRAMEWORKS.get(self.framework, ""),
            "buckets": f"{sizes[0][0]} {sizes[0][1]:.0e}".replace("e+0", "e") if sizes else "",
        }

    def colour_key(self, side: str) -> str:
        """Return the property that a figure's colour stands for. Buckets and live parameters of one size have one colour."""
        return self.sides[side].rpartition(" ")[2] if side == "buckets" else self.sides[side]


def _printed_figures(table: PublishedTable, metric: Metric) -> Iterator[_Printed]:
    rows = table.published()
    figures = [
        [
            _Printed(row, name, figure)
            for name in FRAMEWORKS
            if (figure := getattr(row.figures.get(name), metric.field, None)) is not None
        ]
        for row in rows
    ]
    # A row that failed is drawn only beside figures that all other rows have.
    complete = any(figures) and all(of_row or row.outcome in OUTCOMES for row, of_row in zip(rows, figures, strict=True))
    for row, of_row in zip(rows, figures, strict=True):
        yield from of_row or ([_Printed(row, GATED, None)] if complete else [])


def _chart_of(
    table: PublishedTable,
    metric: Metric,
    model: str,
    drawn: Sequence[_Printed],
    measured: Callable[[Published], Result | None],
    charts: Charts,
) -> CaptionedChart:
    groups: defaultdict[str, list[_Printed]] = defaultdict(list)
    for name, figure in zip(_group_names([figure.row.case for figure in drawn]), drawn, strict=True):
        groups[name].append(figure)
    varied = {name: _varied([figure.sides for figure in of_group]) for name, of_group in groups.items()}
    often = Counter(side for sides in varied.values() for side in sides)
    coloured = often.most_common(1)[0][0] if often else "platform"
    values = dict.fromkeys(key for figure in drawn if (key := figure.colour_key(coloured)))
    ordered = sorted(values, key=float) if coloured == "buckets" else values
    colours = {value: _PALETTE[number % len(_PALETTE)] for number, value in enumerate(ordered)}
    bars: list[tuple[str, list[Bar]]] = []
    rows: list[tuple[str, ...]] = []
    for name, of_group in groups.items():
        bars.append((name, []))
        for figure in of_group:
            shown = printed(metric, figure.figure) if figure.figure else OUTCOMES[figure.row.outcome]
            who = ", ".join(text for side, text in figure.sides.items() if text and side in (*varied[name], coloured))
            length = figure.figure.middle if figure.figure else 0.0
            bars[-1][1].append(
                Bar(parts=((length, colours.get(figure.colour_key(coloured), _PLAIN)),), text=f"{shown} {who}")
            )
            result = measured(figure.row)
            value = metric.measured(result) if result else None
            rows.append((name, shown, "" if value is None else f"{value:.6g}", who))
            of_row = {other.framework: other.figure for other in of_group if other.row is figure.row}
            if value is not None and figure.framework == [*of_row][-1]:
                published = {framework: other for framework, other in of_row.items() if other}
                bars[-1][1].append(_measured_bar(metric, value, published))
    platform = f" on {drawn[0].sides['platform']}" if len(table.platforms) == 1 else ""
    title = f"{table.name}{platform}: {metric.title}{f' of {model}' if model else ''}"
    unit = " elements" if coloured == "buckets" else ""
    legend = [LegendEntry(text=f"{value}{unit}", colour=colour) for value, colour in colours.items() if len(colours) > 1]
    if any(part[1] == 0 for _, of_group in bars for bar in of_group for part in bar.parts):
        legend.append(LegendEntry(text=_HERE, colour=0))
    measured_unit = (
        "bytes" if metric.field.endswith("_bytes") else "s" if metric.field.endswith("_seconds") else metric.title
    )
    return CaptionedChart(
        title=title,
        about=f"{_direction(metric)} {table.source.document} of {table.source.repository}.",
        chart=charts.bars(bars, title=title, description=_description(bars)),
        legend=tuple(legend),
        headers=("Case", "Published", f"Measured ({measured_unit})", "Of"),
        rows=tuple(rows),
        table=f"The figures ({count(len(rows), 'row')})",
    )


def _group_names(cases: Sequence[Case]) -> list[str]:
    """Return names that distinguish the cases, without the sizes of buckets."""
    parts = [
        {
            **{name: str(getattr(case, name)) for name in ("model", "method", "precision", "parallel")},
            **{knob: _knob_text(knob, getattr(case, knob)) for knob in case.named if knob not in _BUCKETS},
        }
        for case in cases
    ]
    varied = _varied(parts)
    return [
        ", ".join(text for name, text in of_case.items() if name in varied and text) or case.model
        for of_case, case in zip(parts, cases, strict=True)
    ]


def _knob_text(knob: str, value: object) -> str:
    title = knob.replace("_", " ")
    return (title if value else "") if isinstance(value, bool | None) else f"{title} {value}"


def _varied(records: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the fields whose texts differ between records."""
    names = dict.fromkeys(name for record in records for name in record)
    return [name for name in names if len({record.get(name, "") for record in records}) > 1]
