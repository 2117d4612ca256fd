"""Renders the HTML page from reports and histories as one file that loads nothing else."""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from pytest_gputrain.gate.messages import count
from pytest_gputrain.records import Course, Published, Report, Result
from pytest_gputrain.records.emulation import Emulation
from pytest_gputrain.report import explanations, studies
from pytest_gputrain.report.trend.reading import Filter, History, Subject
from pytest_gputrain.report.trend.series import DEFAULT_METRICS, analyse, is_told
from pytest_gputrain.storage.baselines import BaselineError
from pytest_gputrain.storage.published import PublishedStore, PublishedTable
from pytest_gputrain.utils.files import write_atomically
from pytest_gputrain.utils.sanitize import shown

if TYPE_CHECKING:
    from jinja2 import Environment

    from pytest_gputrain.report.html.charts import Charts
    from pytest_gputrain.report.html.sections import CaptionedChart

_NEEDED: Final = ("jinja2", "matplotlib")
_MOST_DRAWN: Final = 20
"""Failing cases whose figures are drawn beside those of their baselines."""


class HistoryTrends(NamedTuple):
    """Histories, and the courses of their metrics."""

    history: History
    courses: tuple[Course, ...]


def read_trends(paths: Sequence[Path], warn: Callable[[str], None]) -> HistoryTrends:
    """Return the time and memory of every case from files of ``--gpu-history``.

    Args:
        warn: called with a sentence for what is left out.

    Raises:
        HistoryError: they cannot be read, or hold nothing.
    """
    history = History(paths, DEFAULT_METRICS, Filter(), warn)
    return HistoryTrends(history, tuple(filter(is_told, analyse(history, DEFAULT_METRICS))))


def missing() -> str:
    """Say what must be installed to make a page; empty if nothing is missing."""
    lacking = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if not lacking:
        return ""
    them = "it" if len(lacking) == 1 else "them"
    return f"the HTML report needs {' and '.join(lacking)}; install {them} with: pip install 'pytest-gputrain[report]'"


def write(path: Path, reports: Sequence[Report], history_trends: HistoryTrends | None = None, *, baseline_dir: Path) -> None:
    """Write the page completely, or leave the file as it is.

    Args:
        baseline_dir: where published tables are looked for.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(path, page(reports, history_trends, baseline_dir=baseline_dir).encode())


def page(reports: Sequence[Report], history_trends: HistoryTrends | None = None, *, baseline_dir: Path) -> str:
    """Return the page as text; see `write`."""
    from pytest_gputrain.report.html import cases, published, sections, trends
    from pytest_gputrain.report.html.charts import Charts

    reports = sorted(reports, key=lambda report: report.created)
    results = [result for report in reports for result in report.results]
    notes = [
        *explanations.explain(results),
        *studies.explain(results),
        *(note for report in reports for note in report.notes),
    ]
    charts = Charts()
    figures = {
        "published": tuple(published.beside_measured(results, _tables(baseline_dir, notes.append), charts)),
        "scaling": tuple(sections.scaling(results, charts)),
        "losses": tuple(sections.losses(results, charts)),
        "memory": tuple(sections.memory(results, charts)),
    }
    subjects = {Subject(result.suite, result.key, result.device) for result in results}
    gathered = cases.gathered(results)
    beside = [tuple(sections.beside_baseline(row.result, charts)) for row in gathered.failures[:_MOST_DRAWN]]
    if left := len(gathered.failures) - len(beside):
        notes.append(f"the figures of {count(left, 'failing case')} more are not drawn beside those of their baselines")
    cards = (
        trends.cards(history_trends.history, history_trends.courses, subjects, charts, notes.append)
        if history_trends
        else []
    )
    return _rendered(
        charts,
        figures,
        reports=reports,
        cases=gathered,
        beside=beside,
        environments=cases.environment_summaries(results),
        cards=cards,
        notes=list(dict.fromkeys(notes)),
    )


def page_of_tables(tables: Sequence[PublishedTable], measured: Callable[[Published], Result | None]) -> str:
    """Return the page of published tables, with what was measured for their rows."""
    from pytest_gputrain.report.html import published
    from pytest_gputrain.report.html.charts import Charts

    charts = Charts()
    figures = {"tables": tuple(published.whole_tables(tables, measured, charts))}
    without = [table.name for table in tables if not any(row.figures for row in table.rows)]
    return _rendered(
        charts,
        figures,
        notes=[f"{name} prints no figures, so nothing of it is drawn" for name in without],
    )


def page_of_emulation(report: Emulation) -> str:
    """Return the page on what a program took of an emulated GPU."""
    from pytest_gputrain.report.html import emulation
    from pytest_gputrain.report.html.charts import Charts

    charts = Charts()
    figures = {
        "course": tuple(emulation.courses(report, charts)),
        "peak": tuple(emulation.peaks(report, charts)),
        "asked": tuple(emulation.asked(report, charts)),
    }
    return _rendered(
        charts,
        figures,
        title=f"{shlex.join(report.command)} on an emulated {report.device_name}",
        notes=list(emulation.notes(report)),
    )


def _rendered(charts: Charts, figures: Mapping[str, Sequence[CaptionedChart]], **others: Any) -> str:
    """Return the filled template, with the styles of the charts so far."""
    from pytest_gputrain.report.html import cases

    environment = templates()
    absent = {"cases": cases.gathered([]), "beside": [], "reports": [], "environments": [], "cards": []}
    css = f"{source(environment, 'page.css')}\n{charts.css}\n"
    script = source(environment, "page.js")
    text = environment.get_template("page.html").render(
        css=css,
        script=script,
        hash_of=hash_of,
        figures=defaultdict(tuple, figures),
        tones=cases.TONES,
        **{"title": "GPU training benchmarks", **absent, **others},
        count=count,
    )
    return shown(text)


def _tables(baseline_dir: Path, warn: Callable[[str], None]) -> PublishedStore | None:
    try:
        return PublishedStore.beside(baseline_dir.absolute())
    except BaselineError as error:
        warn(str(error))
        return None


@functools.cache
def templates() -> Environment:
    """Return jinja2's environment for the templates of this folder."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def source(environment: Environment, name: str) -> str:
    """Return the text of a file of this folder."""
    assert environment.loader is not None
    return environment.loader.get_source(environment, name)[0]


def hash_of(text: str) -> str:
    """Return the hash by which a Content-Security-Policy allows a part of the page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
