"""Notes where a run is green because something was not there: cases that were all skipped, failures that a test caught, and
baselines that no test asks for any more, which ``--gpu-baseline-prune`` removes.

Which cases a file has shows only when all of its tests were to run on the device whose baselines they are. Nothing is said
of baselines of other files, and nothing removed. A test that was skipped asks for the cases that it is parametrized with.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any, Final, NamedTuple

from pytest_gputrain.cases.identity import suite_of
from pytest_gputrain.execution.settings import Settings
from pytest_gputrain.gate.messages import count
from pytest_gputrain.plugin.case_tests import CaseTests, WholeFiles, with_numbers
from pytest_gputrain.records import Emulated, Host, Measured, Result
from pytest_gputrain.records.result import CaseResult
from pytest_gputrain.report.collector import Collector
from pytest_gputrain.session.criteria import is_strict
from pytest_gputrain.session.selection import platforms_named
from pytest_gputrain.storage.baselines import BaselineError, BaselineStore, SuiteStore
from pytest_gputrain.storage.emulated import EmulationStore
from pytest_gputrain.utils.git import files_of_repository, in_pull_request

_MOST_SHOWN: Final = 3

_STORES: Final[dict[type[CaseResult], type[SuiteStore[Any, Any]]]] = {
    Measured: BaselineStore,
    Emulated: EmulationStore,
}
"""The stores of the baselines, for results of cases as declared."""


def note_missing(collector: Collector, tests: CaseTests, expression: str, *, ended: bool) -> None:
    """Note why a run that passed has not compared everything. In a strict run this fails.

    Args:
        expression: of ``-m``.
        ended: whether it came to its end, so that no test is missing for another reason.
    """
    settings, results, notes = collector.settings, collector.results, collector.notes
    strict = is_strict(settings)
    if ended and tests.are_all_missed and not results:
        verb = "emulated" if settings.emulate else "measured"
        notes.append(f"nothing was {verb}: every case was skipped ({tests.why_missed()})")
        is_asked_for = settings.emulate or bool(platforms_named(expression))
        # A project may skip tests for its own reasons, for example slow ones. So such tests fail the run only if somebody
        # asked for strictness.
        collector.failed |= (strict and is_asked_for) or (settings.strict is True and tests.are_skipped_by_others)
    elif tests.outcomes and all(result.figures is None for result in results):
        notes.append(f"no case gave figures: {tests.counted()}")
    for how, sentences in {
        "caught by the test, which passed": tests.caught,
        "expected by a mark (xfail)": tests.expected,
    }.items():
        if sentences:
            more = f" (and {len(sentences) - 1} more)" if len(sentences) > 1 else ""
            notes.append(f"{count(len(sentences), 'failure')} {how}: {sentences[0]}{more}")
    collector.failed |= strict and bool(tests.caught)
    if settings.baseline_update and results and in_pull_request():
        notes.append(
            "the gate did not run in this pull request's job: --gpu-baseline-update records figures, and compares none"
        )


def note_unclaimed(
    collector: Collector, files: WholeFiles, without_cases: Set[Path], host: Callable[[], Host | None]
) -> int:
    """Note the baselines that no test asks for any more, or remove them. Return how many remain.

    Args:
        without_cases: the test files that were collected and have no test with cases.
        host: returns the machine whose baselines are meant if there are no results; None if that is not known.
    """
    settings, notes = collector.settings, collector.notes
    found = list(_unclaimed(settings, collector.results, files, _abandoned(settings.root, without_cases), host))
    sure = [entry for entry in found if not entry.unknown]
    if not settings.baseline_prune:
        if sure:
            notes.append(f"no test asks any more for {_described(sure)}; --gpu-baseline-prune removes such baselines")
            collector.failed |= is_strict(settings)
        for entry in found:
            if entry.unknown:
                notes.append(f"no test that ran to its end asked for {_described([entry])}; {entry.unknown}")
        return sum(len(entry.keys) for entry in found)
    unseen = {suite_of(path) for path in files.paths if files.why_partial(path)}
    for entry in sure:
        if entry.suite in unseen:
            continue
        try:
            notes.append(entry.remove())
        except BaselineError as error:
            notes.append(str(error))
            collector.failed = True
    notes += filter(None, [_why_not_pruned(files, collector.results)])
    return 0


class _Unclaimed(NamedTuple):
    """Entries of a file of baselines that no test asked for."""

    store: SuiteStore[Any, Any]
    device: str
    suite: str
    keys: tuple[str, ...]
    unknown: str
    """The tests that may have asked for them, if they had run to their end; empty for none."""

    def remove(self) -> str:
        """Remove the entries, and return a sentence on them.

        Raises:
            BaselineError: the file cannot be read or written.
        """
        path = self.store.remove(self.device, self.suite, self.keys)
        return f"{count(len(self.keys), 'baseline')} removed from {path}; review the difference in git"


def _abandoned(root: Path, without_cases: Set[Path]) -> set[str]:
    """Return the suites all of whose files in the repository have no test with cases.

    Another file of the same name may be the one that has recorded the baselines.
    """
    suites = {suite_of(path) for path in without_cases}
    files = (files_of_repository(root) or root.rglob("*.py")) if suites else ()
    return suites - {suite_of(path) for path in files if path.suffix == ".py" and path not in without_cases}


def _unclaimed(
    settings: Settings, results: Sequence[Result], files: WholeFiles, abandoned: Set[str], host: Callable[[], Host | None]
) -> Iterator[_Unclaimed]:
    """Yield stored entries that no test asked for. Only suites that this run has seen completely count, on the devices of
    the results."""
    if not _asks_for_every_case(settings):
        return
    paths: defaultdict[str, list[Path]] = defaultdict(list)
    for path in files.paths:
        paths[suite_of(path)].append(path)
    claimed = _claimed(results)
    # A suite with results is not abandoned, even if its file does not show that its tests ask for cases.
    abandoned -= {result.suite for result in results}
    whole: Set[str] = {suite for suite in paths if not any(map(files.is_a_part, paths[suite]))} | abandoned
    seen = {(store_type, device, is_tiny) for store_type, device, _, is_tiny in claimed}
    # Suites in `abandoned` have baselines, but no file of theirs has a test with cases any more.
    expected: Set[str] = whole & {*map(suite_of, files.with_cases), *abandoned}
    if not seen:
        expected = {suite for suite in expected if not any(map(files.is_for_others, paths[suite]))}
    if expected and not seen and (machine := host()) is not None:
        here = (EmulationStore, machine.platform) if settings.emulate else (BaselineStore, machine.device)
        seen = {(*here, False), (*here, True)}
    for (store_type, device, is_tiny), suite in itertools.product(seen, expected):
        claimed.setdefault((store_type, device, suite, is_tiny), set())
    for (store_type, device, suite, is_tiny), keys in sorted(claimed.items(), key=lambda entry: entry[0][1:]):
        if suite not in whole:
            continue
        store = store_type(settings.baseline_dir)
        try:
            stored = store.suite(device, suite)
        except BaselineError:
            continue  # The tests have reported this error.
        unknown = []
        for end, cases in (test for path in paths[suite] for test in files.not_passed(path)):
            asked = {key for case in cases for key in (case, f"{case}@tiny") if key in stored}
            keys.update(asked)
            if not asked:  # This test never asked for its cases, so they are unknown.
                unknown.append(end)
        # A file may declare cases for as many GPUs as it finds, so cases of more GPUs belong to other machines.
        most = max((result.case.gpus for result in results if result.suite == suite), default=1)
        gone = tuple(
            sorted(
                key
                for key, record in stored.items()
                if key not in keys and key.endswith("@tiny") == is_tiny and record.case.gpus <= most
            )
        )
        if gone:
            yield _Unclaimed(store, device, suite, gone, with_numbers(unknown))


def _claimed(results: Sequence[Result]) -> dict[tuple[type[SuiteStore[Any, Any]], str, str, bool], set[str]]:
    """Return the keys that tests asked for, by kind of baseline, device, suite, and whether they are of the tiny scale."""
    claimed = defaultdict(set)
    for result in results:
        if (store_type := _STORES.get(type(result))) is not None:
            device = result.device if store_type is BaselineStore else result.platform
            claimed[store_type, device, result.suite, result.scale == "tiny"].add(result.key)
    return claimed


def _why_not_pruned(files: WholeFiles, results: Sequence[Result]) -> str:
    """Say for which files with cases nothing could be removed; empty for none."""
    suites = {result.suite for result in results}
    reasons = {path.name: why for path in files.paths if suite_of(path) in suites and (why := files.why_partial(path))}
    listed = "; ".join(f"{name}: {why}" for name, why in reasons.items())
    return f"not pruned, because not every test ran to its end: {listed}" if listed else ""


def _described(found: Sequence[_Unclaimed]) -> str:
    """Describe the baselines that no test asked for."""
    names = [f"{entry.suite} {key} on {entry.device}" for entry in found for key in entry.keys]
    more = f" and {len(names) - _MOST_SHOWN} more" if len(names) > _MOST_SHOWN else ""
    return f"{count(len(names), 'baseline')}: {', '.join(names[:_MOST_SHOWN])}{more}"


def _asks_for_every_case(settings: Settings) -> bool:
    """Tell whether the tests of this run ask for their cases as they are stored, without changes by options."""
    if settings.sweep or settings.find_batch or settings.loss_steps is not None or settings.baseline != "measured":
        return False
    return settings.steps is None and settings.warmup is None  # a case may name its steps in its id
