"""Collects the results of a whole run in the only pytest process, or in xdist's controller, and has them written at its end.

Baselines, reports and the history are written by storage and by the other modules of this package.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from pytest_gputrain.cases.identity import same_id
from pytest_gputrain.execution.resume import ResumedReport
from pytest_gputrain.execution.settings import Settings
from pytest_gputrain.gate.messages import count
from pytest_gputrain.gate.suite_noise import whole_suite
from pytest_gputrain.hardware.catalog import CPU
from pytest_gputrain.records import Case, Emulated, Measured, Report, Result, Verdict
from pytest_gputrain.report import history_lines, json_report, seen, uncompared
from pytest_gputrain.storage.baselines import BaselineError, BaselineStore, SuiteStore
from pytest_gputrain.storage.emulated import EmulationStore
from pytest_gputrain.storage.history import HistoryError, append
from pytest_gputrain.storage.reports import to_baseline, to_recorded
from pytest_gputrain.utils.git import RunInfo
from pytest_gputrain.utils.masking import masked, masked_settings, told
from pytest_gputrain.utils.sanitize import utf8

_SAVE_EVERY_SECONDS: Final = 30.0
_PAUSE_FACTOR: Final = 20
"""The least pause, in multiples of what the last saving took: files grow, and every saving writes all of them."""
_NOT_ENDED: Final = 2
"""pytest's exit status of a run that was interrupted."""


class _RecordedCase(NamedTuple):
    """A case that becomes a baseline, as a test ran it."""

    case: Case
    nodeid: str
    key: str
    variables: tuple[str, ...]
    digest: str


class Collector:
    """Collects results, stores baselines under the update options, writes the reports and the history.

    Baselines and the report are saved now and then and at the end, so that a run that is killed loses half a minute of
    cases, or a few where saving takes seconds.
    """

    def __init__(self, settings: Settings, resumed_report: ResumedReport | None = None) -> None:
        self.settings = settings
        self._resumed_report = resumed_report
        self.results: list[Result] = []
        self.notes: list[str] = []
        self.failed = False
        """Whether something could not be saved."""
        self._session: RunInfo | None = None
        self._indices: dict[tuple[str, str, str], int] = {}
        """The index of the last result, by test, case and changed variables."""
        self._incomplete: set[int] = set()
        """The indices of the results whose baselines wait for further runs."""
        self._pending: dict[type[SuiteStore[Any, Any]], defaultdict[tuple[str, str], dict[str, Any]]] = {
            store_type: defaultdict(dict) for store_type in (BaselineStore, EmulationStore)
        }
        """The results that wait to be saved, by store, and there by device and suite."""
        self._recorded: dict[Path, int] = {}
        self._unchanged: Counter[Path] = Counter()
        """The number of these that existed with the same figures."""
        self._stored: dict[tuple[str, str, str], _RecordedCase] = {}
        """The results that become a baseline, by device, suite and key."""
        self._records_resumed = False
        """Whether a baseline has runs of an earlier session."""
        self._save_at = time.monotonic() + _SAVE_EVERY_SECONDS

    @property
    def session(self) -> RunInfo:
        """The time and the commit of this run. Both are read with the first result, because other runs need no git."""
        if self._session is None:
            self._session = RunInfo.begin(self.settings.root, self.settings.written)
        return self._session

    def add(self, result: Result, *, passed: bool) -> None:
        """Add the next result.

        Args:
            passed: whether its test did; figures of a test that failed otherwise become no baseline.
        """
        self._indices[result.nodeid, result.key, result.variables_digest] = len(self.results)
        if not passed and isinstance(result, Measured):
            result = msgspec.structs.replace(result, to_come=0)
        self._note_incomplete(len(self.results), result)
        self.results.append(result)
        if passed:
            self._record_if_complete(result)
        elif _is_recorded(result):
            self.notes.append(f"not recorded: {result.case}, because its test failed")
        self._save_now_and_then()

    def update(self, result: Result) -> None:
        """Replace a result by one with a further run of its baseline."""
        index = self._indices.get((result.nodeid, result.key, result.variables_digest))
        if index is None:
            return
        self.results[index] = result
        self._note_incomplete(index, result)
        self._record_if_complete(result)
        if not _is_recorded(result):
            self.notes.append(f"not recorded: {result.case}, because not all runs of its baseline gave figures")
        self._save_now_and_then()

    def _note_incomplete(self, index: int, result: Result) -> None:
        (self._incomplete.add if _is_incomplete(result) else self._incomplete.discard)(index)

    def _record_if_complete(self, result: Result) -> None:
        if _is_recorded(result) and not _is_incomplete(result):
            self._record(result)

    def _record(self, result: Result) -> None:
        stored = _RecordedCase(result.case, result.nodeid, result.key, result.variables, result.variables_digest)
        first = self._stored.setdefault((result.device, result.suite, result.key), stored)
        if first.case.identity() != result.case.identity():
            # A single process refuses such a case before it measures. The workers of xdist do not know each other's cases,
            # so the collector refuses it here.
            self.failed = True
            self.notes.append(f"not recorded: {same_id(result.suite, first.case, result.case)}")
            return
        if first.digest != stored.digest:
            chosen, other = (first, stored) if stored.variables else (stored, first)
            self._note_left_out(other, chosen)
            if chosen is first:
                return
            self._stored[result.device, result.suite, result.key] = stored
        if isinstance(result, Emulated) and (recorded := to_recorded(result)) is not None:
            self._pending[EmulationStore][result.platform, result.suite][result.key] = recorded
            return
        assert isinstance(result, Measured), "nothing else is recorded"
        self._records_resumed = self._records_resumed or bool(result.resumed)
        session = self.session
        baseline = to_baseline(result, date=session.created, session=session.id, commit=session.commit)
        self._pending[BaselineStore][result.device, result.suite][result.key] = baseline

    def _note_left_out(self, other: _RecordedCase, chosen: _RecordedCase) -> None:
        """Note a test whose figures become no baseline, because figures of another environment were chosen."""
        baseline_test = f"{chosen.nodeid}, which changes no variable"
        if chosen.variables:
            self.failed = True
            baseline_test = (
                f"{chosen.nodeid}, which changes {', '.join(chosen.variables)}; give own code a model=NAME for each "
                "environment, or set the variables before pytest starts, each time with a --gpu-baseline-dir of its own"
            )
        sentence = (
            f"{other.case} is not recorded as {other.nodeid} ran it, which changes environment variables "
            f"({', '.join(other.variables)}): its baseline is that of {baseline_test}"
        )
        index = self._indices[other.nodeid, other.key, other.digest]
        verdict = Verdict(status="not-comparable", sentence=sentence)
        self.results[index] = msgspec.structs.replace(self.results[index], verdict=verdict)

    def close(
        self,
        exit_status: int,
        *,
        ran: bool = True,
        is_listing: bool = False,
        skipped: int = 0,
        left_out: int = 0,
        unclaimed: int = 0,
    ) -> None:
        """Save everything. If something cannot be saved, it is named in `notes` and written elsewhere, and the run fails.

        Args:
            ran: whether any test with cases did; without, reports that there are stay as they are.
            is_listing: whether the run only lists tests, and makes no report either.
            skipped, left_out, unclaimed: see `uncompared.line`.
        """
        if trouble := self._save_baselines():
            self._write_elsewhere("; ".join(trouble), self._report(1))
        self._note_unfinished()
        self._note_resumed()
        self._append_history()
        if sentence := self.suite_shift()[1]:
            self.notes.append(sentence)
        exit_status = exit_status or int(self.failed)
        if changed := [stored for stored in self._stored.values() if stored.variables]:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            names = ", ".join(changed[0].variables)
            self.notes.append(f"recorded with environment variables that a test changes: {changed[0].case} ({names}){more}")
        for path, number in self._recorded.items():
            self.notes.append(_recorded_in(path, number, self._unchanged[path]))
        new = [path for path, number in self._recorded.items() if number > self._unchanged[path]]
        measured_on_gpus = {result.device for result in self.results if isinstance(result, Measured)} - {CPU}
        on_gpus = any(path.parent.name in measured_on_gpus for path in new)
        if on_gpus and not self._records_resumed:
            self.notes.append("all runs of these baselines come from this session, so they do not show how much days differ")
        kept = () if ran else self._note_kept(is_listing)
        line = uncompared.line(self.results, skipped=skipped, left_out=left_out, unclaimed=unclaimed)
        self.notes += filter(None, [seen.line(self.results), line])
        written = [file for file in (self.settings.json, self.settings.html) if file is not None and file not in kept]
        self.notes += filter(None, [told(sys.argv[1:]) if written else ""])
        for file, write in ((self.settings.json, json_report.write), (self.settings.html, self._write_page)):
            if file in written:
                report = self._report(exit_status)
                try:
                    write(report, file, self.results)
                except OSError as error:
                    self._write_elsewhere(f"the report {file} cannot be written: {error.strerror}", report)

    def _note_kept(self, is_listing: bool) -> Sequence[Path]:
        """Note which files a run without cases leaves as they are, and return them."""
        files = [path for name, path in self.settings.outputs.items() if name != "history"]
        present = [path for path in files if path.exists()]
        if present:
            self.notes.append(f"no case was run, so nothing was written to {', '.join(map(str, present))}")
        return files if is_listing else present

    def _write_page(self, report: Report, path: Path, results: Sequence[Result]) -> None:
        from pytest_gputrain.report.html import page

        history_trends = None
        if self.settings.history is not None and self.settings.history.exists():
            try:
                history_trends = page.read_trends([self.settings.history], self.notes.append)
            except HistoryError as error:
                self.notes.append(f"{path} shows no trends: {error}")
        whole = msgspec.structs.replace(report, results=(*report.results, *results))
        page.write(path, [whole], history_trends, baseline_dir=self.settings.baseline_dir)

    def _append_history(self) -> None:
        path = self.settings.history
        if path is None or not self.results:
            return
        try:
            lines = history_lines.unwritten(path, history_lines.lines_of(self.results, self.session), self.session)
            repaired = append(path, lines) if lines else ""
        except HistoryError as error:
            self._write_elsewhere(f"nothing is appended to the history: {error}", self._report(1))
        except OSError as error:
            self._write_elsewhere(f"the history {path} cannot be written: {error.strerror}", self._report(1))
        else:
            appended = f"{count(len(lines), 'line')} appended to {path}" if lines else ""
            self.notes += filter(None, [repaired, appended])

    def _note_unfinished(self) -> None:
        """Note the baselines whose runs were not all measured when the run was ended."""
        if not self._incomplete:
            return
        wanted = 0
        for index in self._incomplete:
            result = self.results[index]
            assert isinstance(result, Measured), "nothing else waits for runs"
            wanted = len(result.replies) + result.to_come
            self.results[index] = msgspec.structs.replace(result, verdict=None)
        trouble = (
            f"not recorded: {count(len(self._incomplete), 'case')}, because the run was ended before all had {wanted} runs"
        )
        if self.settings.json is None:
            self._write_elsewhere(trouble, self._report(1))
        else:
            self.notes.append(f"{trouble}; all figures are in {self.settings.json}")

    def _note_resumed(self) -> None:
        if self._resumed_report is None:
            return
        cases = {
            (result.device, result.suite, result.key)
            for result in self.results
            if isinstance(result, Measured) and result.resumed
        }
        sentence = f"{count(len(cases), 'case') if cases else 'no case'} taken from {self._resumed_report.path}"
        unknown = (
            ""
            if self._resumed_report.report.commit and self.session.commit
            else "; it is not known whether the code is the same"
        )
        self.notes.append(sentence + unknown)

    def suite_shift(self) -> tuple[bool, str]:
        """Tell whether the suite regressed as a whole, with a sentence about it."""
        if self.settings.baseline_update:
            return False, ""
        return whole_suite(self.results, self.settings.time_tolerance)

    def _save_now_and_then(self) -> None:
        """Save now what a power cut would lose. A failure is reported only at the end, because the disk may have space
        then."""
        began = time.monotonic()
        if began <= self._save_at:
            return
        self._save_baselines()
        if self.settings.json is not None:
            with contextlib.suppress(OSError):
                json_report.write(self._report(_NOT_ENDED), self.settings.json, self.results)
        ended = time.monotonic()
        self._save_at = ended + max(_SAVE_EVERY_SECONDS, _PAUSE_FACTOR * (ended - began))

    def _save_baselines(self) -> list[str]:
        """Save the baselines. Return why some could not be saved; those are tried again later."""
        trouble = []
        for store_type, waiting in self._pending.items():
            store = store_type(self.settings.baseline_dir)
            for group, entries in list(waiting.items()):
                try:
                    path = store.update(*group, entries)
                except BaselineError as error:
                    trouble.append(str(error))
                else:
                    self._recorded[path] = self._recorded.get(path, 0) + len(waiting.pop(group))
            self._unchanged += store.unchanged
        return trouble

    def _write_elsewhere(self, trouble: str, report: Report) -> None:
        """Write every figure to a file in the temporary folder, because the figures' own file cannot be written."""
        self.failed = True
        elsewhere = Path(tempfile.gettempdir()) / f"gputrain-{report.session}.json"
        try:
            json_report.write(report, elsewhere, self.results)
        except OSError as error:
            self.notes.append(f"{trouble}; nor could the figures be kept in {elsewhere}: {error.strerror}")
        else:
            self.notes.append(f"{trouble}; all figures are in {elsewhere}")

    def _report(self, exit_status: int) -> Report:
        """Return the report without the results of this run, which are written one by one."""
        settings = msgspec.to_builtins(self.settings, enc_hook=str)
        return Report(
            generator=json_report.generator(),
            created=self.session.created,
            session=self.session.id,
            commit=self.session.commit,
            changes=self.session.changes,
            branch=utf8(self.session.branch),
            arguments=masked(map(utf8, sys.argv[1:])),
            settings={
                name: masked_settings(utf8(value) if isinstance(value, str) else value) for name, value in settings.items()
            },
            exit_status=exit_status,
            notes=tuple(self.notes),
            results=tuple(self._resumed_report.beyond(self.results)) if self._resumed_report else (),
        )


def _recorded_in(path: Path, number: int, unchanged: int) -> str:
    if unchanged == number:
        whose = "is unchanged, because its" if number == 1 else "are unchanged, because their"
        return f"{count(number, 'baseline')} in {path} {whose} judged figures are the same"
    same = f"; {unchanged} more {'has' if unchanged == 1 else 'have'} the same figures as before" if unchanged else ""
    return f"{count(number - unchanged, 'baseline')} recorded in {path}; review the difference in git{same}"


def _is_incomplete(result: Result) -> bool:
    """Tell whether the case's baseline lacks runs that are still to come."""
    return isinstance(result, Measured) and result.to_come > 0


def _is_recorded(result: Result) -> bool:
    return result.verdict is not None and result.verdict.status == "recorded"
