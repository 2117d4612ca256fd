"""Renders the answer of ``gputrain predict`` as one HTML file that loads nothing else."""

from __future__ import annotations

import importlib.util
from typing import Final

from pytest_gputrain.records.fit import Fit, FitReport
from pytest_gputrain.report import fit
from pytest_gputrain.report.html.page import hash_of, source, templates
from pytest_gputrain.utils.sanitize import shown

_TONES: Final[dict[Fit, str]] = {"fits": "good", "incomplete": "doubt", "within-error": "doubt", "does-not-fit": "bad"}


def missing() -> str:
    """Say what must be installed to make a page; empty if nothing is missing."""
    if importlib.util.find_spec("jinja2") is not None:
        return ""
    return "the page needs jinja2; install it with: pip install 'pytest-gputrain[report]'"


def page(report: FitReport) -> str:
    """Return the page as text."""
    environment = templates()
    tones = {fit.WORDS[kind]: tone for kind, tone in _TONES.items()}

    def tone_of(cell: str) -> str:
        return next((tone for word, tone in tones.items() if cell.endswith(f" {word}")), "")

    text = environment.get_template("fit.html").render(
        css=f"{source(environment, 'page.css')}\n",
        script="",
        hash_of=hash_of,
        report=report,
        tables=fit.tables(report),
        tone_of=tone_of,
        peaks=fit.peaks(report).items(),
        notes=list(fit.notes(report, with_peaks=False)),
    )
    return shown(text)
