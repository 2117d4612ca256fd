"""Draws charts as SVG elements of the HTML page: matplotlib draws them, and the page's style sheet colours them.

matplotlib writes a style beside each shape. Here each different one becomes a class, because the page allows no style but
its own sheet's, and each `Colour` becomes a variable of that sheet, which has a light and a dark value for it.
"""

from __future__ import annotations

import io
import math
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree

from markupsafe import Markup

from pytest_gputrain.utils.units import GiB, KiB, MiB, format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH: Final = 330
"""The width of every chart, in the units of its drawing: the pixels of a narrow phone, where text then has its full size."""
_TEXT: Final = 11
"""The height of the text in the same units."""


class Colour:
    """The colours that matplotlib gets, which are placeholders for variables of the style sheet."""

    INK: Final = "#000101"
    MUTED: Final = "#000102"
    RULE: Final = "#000103"
    BAD: Final = "#000104"
    GOOD: Final = "#000105"
    SERIES: Final = ("#000111", "#000112", "#000113", "#000114", "#000115", "#000116")


_VARIABLES: Final = {
    Colour.INK: "--ink",
    Colour.MUTED: "--muted",
    Colour.RULE: "--rule",
    Colour.BAD: "--bad",
    Colour.GOOD: "--good",
    **{colour: f"--series-{number}" for number, colour in enumerate(Colour.SERIES, 1)},
}
_DASHES: Final = ("solid", (0, (5, 2)), (0, (2, 1.5)), (0, (7, 2, 1.5, 2)), "solid", (0, (1, 1)))
"""One for each colour of a series, for eyes and printers that do not tell colours apart."""

_SVG: Final = "http://www.w3.org/2000/svg"
_XLINK: Final = "http://www.w3.org/1999/xlink"
_SETTINGS: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a name may have a $
    "axes.unicode_minus": False,
    "path.simplify": False,
    "font.size": _TEXT,
    "axes.edgecolor": Colour.RULE,
    "text.color": Colour.INK,
    "xtick.color": Colour.RULE,
    "ytick.color": Colour.RULE,
    "xtick.labelcolor": Colour.MUTED,
    "ytick.labelcolor": Colour.MUTED,
    "grid.color": Colour.RULE,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A drawing, with its points that show a label."""

    svg: Markup
    points: tuple[tuple[float, float, str], ...] = ()
    """Distance from the left edge and from the upper edge, in the units of the drawing, and the label of each point."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A line of a chart: a series of points."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    labels: Sequence[str]
    """The label of each point."""
    ends: bool = False
    """Whether its end is marked: it goes no further because something failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LevelChange:
    """A change of level in a trend."""

    index: float
    """Index of its first figure."""
    text: str
    worse: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A bar of one or several parts."""

    parts: tuple[tuple[float, int], ...]
    """The length of each part, and the number of its colour."""
    text: str
    """The text that is written after the bar."""
    bad: bool = False
    """Whether the bar and its text have the colour of failures."""


class Charts:
    """Draws the charts of one page and collects the style rules that they need."""

    def __init__(self) -> None:
        self._classes: dict[str, str] = {}
        self._drawn = 0

    @property
    def css(self) -> str:
        """The style rules that all charts so far need."""
        return "\n".join(f".{name}{{{style}}}" for style, name in self._classes.items())

    def trend(
        self,
        dates: Sequence[datetime],
        figures: Sequence[float],
        levels: Sequence[tuple[int, float]],
        level_changes: Sequence[LevelChange],
        labels: Sequence[str],
        *,
        kind: str,
        title: str,
        description: str,
    ) -> Chart:
        """Draw figures over time as points, their levels as lines, and their changes.

        Args:
            levels: index of the first figure of each, and its height.
            kind: as in `axis_unit`.
        """
        from matplotlib import dates as time

        size, unit = axis_unit(kind, max(figures))
        heights = [figure / size for figure in figures]
        middle = max(heights)
        with self._axes(150, left=46, bottom=24, top=20) as (figure, axes):
            days = time.date2num(list(dates))
            # A line of zero length with round ends is drawn as a dot. In the file it takes a tenth of the text of a marker.
            dots = [[position for value in axis for position in (value, value, math.nan)] for axis in (days, heights)]
            axes.plot(*dots, solid_capstyle="round", linewidth=3.6, color=Colour.SERIES[0], alpha=0.6)
            ends = [*(start for start, _ in levels[1:]), len(days)]
            for (start, height), end in zip(levels, ends, strict=True):
                until = days[end] if end < len(days) else days[-1]
                axes.plot([days[start], until], [height / size] * 2, color=Colour.INK, linewidth=1.8)
            low, high = min(heights), max(heights)
            # The axis has at least 2 % of the median, so a tiny scatter does not look large.
            margin = max(high - low, 0.02 * middle) * 0.12
            spread = max(0.0, 0.02 * middle - (high - low)) / 2
            axes.set_ylim(low - margin - spread, high + margin + spread)
            boundaries = [days[0], *(days[int(level_change.index)] for level_change in level_changes), days[-1]]
            for level_change, before, day, after in zip(
                level_changes, boundaries, boundaries[1:], boundaries[2:], strict=False
            ):
                colour = Colour.BAD if level_change.worse else Colour.GOOD
                axes.axvline(day, color=colour, linewidth=1.2, linestyle=(0, (3, 2)))
                # The text stands on the side that has more space.
                is_before_line = day - before > after - day
                axes.annotate(
                    level_change.text,
                    (day, 1.0),
                    xycoords=("data", "axes fraction"),
                    xytext=(-3 if is_before_line else 3, 3),
                    textcoords="offset points",
                    ha="right" if is_before_line else "left",
                    color=colour,
                    fontweight="bold",
                )
            if days[0] == days[-1]:
                axes.set_xlim(days[0] - 0.5, days[0] + 0.5)
            locator = time.AutoDateLocator(minticks=2, maxticks=5)
            axes.xaxis.set_major_locator(locator)
            axes.xaxis.set_major_formatter(time.ConciseDateFormatter(locator, show_offset=False))
            self._measure(axes, unit)
            return self._finished(figure, axes, zip(days, heights, labels, strict=True), title, description)

    def lines(
        self,
        lines: Sequence[Line],
        *,
        x: str,
        y: str,
        title: str,
        description: str,
        ideal: Sequence[tuple[float, float]] = (),
        mark: tuple[float, str] | None = None,
    ) -> Chart:
        """Draw series over a common axis.

        Args:
            ideal: a thin line beside them, whose angle means something: from 0 on.
            mark: a place on that axis, and what is there; heights then begin at 0, too.
        """
        from matplotlib.ticker import MaxNLocator

        with self._axes(190, left=46, bottom=34, top=20) as (figure, axes):
            if ideal:
                axes.plot(*zip(*ideal, strict=True), color=Colour.MUTED, linewidth=1, linestyle=(0, (1, 2)))
            for number, line in enumerate(lines):
                colour = Colour.SERIES[number % len(Colour.SERIES)]
                marker = "o" if len(line.x) <= _FEW_POINTS else ""
                dash: Any = _DASHES[number % len(_DASHES)]
                axes.plot(line.x, line.y, color=colour, linestyle=dash, marker=marker, markersize=4)
                if line.ends and line.x:
                    axes.plot(line.x[-1:], line.y[-1:], color=Colour.BAD, marker="x", markersize=8, markeredgewidth=2)
            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
            if ideal or mark:
                axes.set_ylim(bottom=0)
            if mark:
                place, text = mark
                axes.axvline(place, color=Colour.INK, linewidth=1, linestyle=(0, (3, 2)))
                is_left = place > sum(axes.get_xlim()) / 2  # The text stands on the side that has more space.
                axes.annotate(
                    text,
                    (place, 1.0),
                    xycoords=("data", "axes fraction"),
                    xytext=(-3 if is_left else 3, 3),
                    textcoords="offset points",
                    ha="right" if is_left else "left",
                )
            axes.set_xlabel(x, color=Colour.MUTED, labelpad=2)
            self._measure(axes, y)
            points = [point for line in lines for point in zip(line.x, line.y, line.labels, strict=True)]
            return self._finished(figure, axes, points, title, description)

    def bars(
        self,
        groups: Sequence[tuple[str, Sequence[Bar]]],
        *,
        title: str,
        description: str,
        limit: tuple[float, str] | None = None,
    ) -> Chart:
        """Return a chart of bars from left to right. The name of a group is below its bars.

        Args:
            limit: a length that is marked, and what it is.
        """
        rows = sum(len(bars) for _, bars in groups)
        top = 16 if limit else 4
        names = [textwrap.wrap(_printable(name), _NAME_LETTERS) or [""] for name, _ in groups]
        height = top + 4 + _BAR * rows + sum(_NAME + _NAME_LINE * (len(lines) - 1) for lines in names)
        longest = max(sum(length for length, _ in bar.parts) for _, bars in groups for bar in bars)
        with self._axes(height, left=2, bottom=4, top=top) as (figure, axes):
            y = 0.0
            for lines, (_, bars) in zip(names, groups, strict=True):
                for line in lines:
                    axes.text(0, y + _NAME * 0.55, line, va="center")
                    y += _NAME_LINE
                y += _NAME - _NAME_LINE
                for bar in bars:
                    start = 0.0
                    for length, colour in bar.parts:
                        painted = Colour.BAD if bar.bad else Colour.SERIES[colour]
                        axes.barh(y + _BAR / 2, length, _BAR - 4, left=start, color=painted)
                        start += length
                    axes.annotate(
                        _printable(bar.text),
                        (start, y + _BAR / 2),
                        xytext=(4, 0),
                        textcoords="offset points",
                        va="center",
                        color=Colour.BAD if bar.bad else Colour.MUTED,
                    )
                    y += _BAR
            if limit:
                axes.axvline(limit[0], color=Colour.BAD, linewidth=1.2, linestyle=(0, (3, 2)))
                axes.annotate(
                    limit[1],
                    (limit[0], 1.0),
                    xycoords=("data", "axes fraction"),
                    xytext=(0, 3),
                    textcoords="offset points",
                    ha="right" if limit[0] > longest / 2 else "left",
                    color=Colour.BAD,
                )
            axes.set_ylim(y, 0)
            texts = max(len(bar.text) for _, bars in groups for bar in bars) * _TEXT * 0.62
            axes.set_xlim(0, max(longest * WIDTH / max(WIDTH / 3, WIDTH - texts), limit[0] * 1.02 if limit else 0) or 1)
            axes.set_axis_off()
            return self._finished(figure, axes, (), title, description)

    @contextmanager
    def _axes(self, height: float, *, left: float, bottom: float, top: float) -> Iterator[tuple[Figure, Axes]]:
        """Return axes with margins, in the units of the drawing."""
        import matplotlib
        from matplotlib.figure import Figure

        # rc_context comes first, so that a user's matplotlibrc does not change reports.
        with matplotlib.rc_context(matplotlib.rcParamsDefault), matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
            # matplotlib warns of characters that its own font lacks. The page shows the text in another font.
            warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
            figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)
            axes = figure.add_axes((left / WIDTH, bottom / height, 1 - (left + 8) / WIDTH, 1 - (bottom + top) / height))
            axes.spines[["top", "right", "left"]].set_visible(False)
            axes.tick_params(length=0, pad=4)
            yield figure, axes

    @staticmethod
    def _measure(axes: Axes, unit: str) -> None:
        """Put few numbers at the left of the axes, with their unit above."""
        axes.locator_params(axis="y", nbins=4)
        axes.ticklabel_format(axis="y", style="plain", useOffset=False)
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.annotate(
            unit, (0, 1), xycoords="axes fraction", xytext=(-40, 6), textcoords="offset points", color=Colour.MUTED
        )

    def _finished(self, figure: Figure, axes: Axes, points: Any, title: str, description: str) -> Chart:
        import matplotlib

        self._drawn += 1
        name = f"chart{self._drawn}"
        file = io.StringIO()
        with matplotlib.rc_context({"svg.hashsalt": name}):
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
        height = figure.get_figheight() * 72
        placed = []
        for x, y, text in points:
            right, up = axes.transData.transform((x, y))
            placed.append((round(float(right), 1), round(height - float(up), 1), text))
        return Chart(svg=self._part_of_page(file.getvalue(), name, title, description), points=tuple(placed))

    def _part_of_page(self, text: str, name: str, title: str, description: str) -> Markup:
        """Return matplotlib's SVG file as an element of a page."""
        root = ElementTree.fromstring(text)
        for element in [*root]:
            if element.tag == f"{{{_SVG}}}metadata" or element.find(f"{{{_SVG}}}style") is not None:
                root.remove(element)
        used = set(re.findall(r'(?:href="#|url\(#)([\w-]+)', text))
        for element in root.iter():
            if element.get("id") not in used:
                element.attrib.pop("id", None)
            style = element.attrib.pop("style", None)
            if style is not None:
                element.set("class", self._class(style))
            if "d" in element.attrib:
                element.set(
                    "d", re.sub(r"\d+\.\d+", lambda match: f"{float(match[0]):.1f}", " ".join(element.attrib["d"].split()))
                )
        for attribute in ("width", "height", "version"):
            root.attrib.pop(attribute, None)
        root.set("role", "img")
        for tag, content in (("desc", description), ("title", title)):
            child = ElementTree.Element(f"{{{_SVG}}}{tag}", {"id": f"{name}-{tag}"})
            child.text = _printable(content)
            root.insert(0, child)
        root.set("aria-labelledby", f"{name}-title {name}-desc")
        ElementTree.register_namespace("", _SVG)
        ElementTree.register_namespace("xlink", _XLINK)
        return Markup(ElementTree.tostring(root, encoding="unicode"))

    def _class(self, style: str) -> str:
        style = re.sub(r"\s*font-family:[^;]*;?|(?<=:) ", "", style)
        style = re.sub("|".join(_VARIABLES), lambda match: f"var({_VARIABLES[match[0]]})", style)
        return self._classes.setdefault(style, f"c{len(self._classes)}")


_FEW_POINTS: Final = 12
_BAR: Final = 17
_NAME: Final = 20
_NAME_LINE: Final = 14
_NAME_LETTERS: Final = 50
"""The number of letters that fit the width; longer names take several lines."""


def axis_unit(kind: str, most: float) -> tuple[float, str]:
    """Return the size and the name of the unit for an axis that ends at ``most``.

    Args:
        kind: ``seconds`` or ``bytes``; all else is a number without unit.
    """
    forms = {"seconds": format_seconds, "bytes": format_bytes}
    unit = forms[kind](most).partition(" ")[2] if kind in forms else ""
    return _SIZES.get(unit, 1.0), unit


_SIZES: Final = {"GiB": float(GiB), "MiB": float(MiB), "KiB": float(KiB), "ms": 1e-3, "µs": 1e-6}


def _printable(text: str) -> str:
    """Return the text without characters that XML cannot contain."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
