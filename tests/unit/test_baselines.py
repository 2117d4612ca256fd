"""Baseline files of both kinds: what goes in comes out, nothing else changes, and what cannot be read is told."""

import json
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit_examples import (
    CASE,
    KINDS,
    baseline,
    baseline_run,
    cpu_environment,
    crashed,
    emulated_run,
    gpu_environment,
    measurement,
    oom_run,
    out_of_memory,
    recorded,
    report,
    result,
    timed_out,
    unsigned,
    values_of,
    without_digests,
)

from pytest_gputrain.records import MAX_RUNS, BaselineRun, Case, EmulatedRun, Environment, Origin
from pytest_gputrain.records.study import LossCurve
from pytest_gputrain.report import json_report
from pytest_gputrain.storage.baselines import BaselineError, BaselineStore
from pytest_gputrain.storage.reports import ReportStore, to_baseline

DEVICE, SUITE, KEY = "nvidia-h100-80gb-hbm3", "llm", str(CASE)
MEASURED, EMULATED = KINDS
both_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


FIGURES = st.none() | st.integers(0, 2**63 - 1)
RUNS = st.builds(
    BaselineRun,
    outcome=st.just("measured"),
    environment=st.sampled_from([gpu_environment(), gpu_environment(driver="1")]) | values_of(Environment).map(unsigned),
    date=st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    session=st.just("s"),
    commit=st.sampled_from(["", "abc", "abc+dirty"]),
    warmup=st.integers(0, 9),
    step_seconds=st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=12).map(tuple),
    peak_allocated_bytes=st.integers(0, 2**63 - 1),
    **dict.fromkeys(("peak_reserved_bytes", "peak_host_bytes", "model_bytes", "flops_per_step"), FIGURES),
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
KEYS = NAMES | NAMES.map(lambda name: f"{name}@tiny")


def _scale(key):
    return "tiny" if key.endswith("@tiny") else "full"


def _possible(run):
    run = unsigned(run)
    peaks = sorted((run.peak_allocated_bytes, run.peak_reserved_bytes))
    return msgspec.structs.replace(run, peak_allocated_bytes=peaks[0], peak_reserved_bytes=peaks[1]).as_stored()


WRITTEN = {
    "measured": st.dictionaries(KEYS, st.lists(RUNS | st.just(oom_run()), min_size=1, max_size=4), max_size=3).map(
        lambda runs: {key: baseline(*of, scale=_scale(key)) for key, of in runs.items()}
    ),
    "emulated": st.dictionaries(KEYS, st.tuples(values_of(EmulatedRun).map(_possible), values_of(Case)), max_size=2).map(
        lambda made: {key: recorded(of, case=case, scale=_scale(key)) for key, (of, case) in made.items()}
    ),
}


@contextmanager
def _folder():
    """A folder of one hypothesis example; ``tmp_path`` is shared by them all."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _entries(kind):
    return {KEY: kind.record, "other": kind.other}


def _contents(kind, folder):
    return dict(kind.store(folder).suite(kind.device, SUITE))


def _write(kind, folder, data):
    path = kind.file(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _refusal(kind, folder):
    """What reading fails with: one sentence, which begins with the file; without the file."""
    with pytest.raises(BaselineError) as caught:
        kind.get(folder, KEY)
    assert str(caught.value) == f"{kind.file(folder)} {caught.value.without_path}"
    assert len(str(caught.value).splitlines()) == 1
    assert "record" in str(caught.value)
    assert caught.value.path == kind.file(folder)
    return caught.value.without_path


@both_kinds
@settings(max_examples=50)
@given(st.data(), st.randoms(use_true_random=False))
def test_what_is_stored_is_got_back_and_the_same_figures_are_the_same_bytes(kind, data, random):
    entries = data.draw(WRITTEN[kind.name])
    shuffled = list(entries.items())
    random.shuffle(shuffled)
    with _folder() as folder, _folder() as other:
        first = kind.update(folder, entries).read_bytes()
        assert _contents(kind, folder) == entries
        assert kind.update(other, dict(shuffled)).read_bytes() == first
        assert kind.store(folder).rewritten(kind.device, SUITE) == first


@both_kinds
def test_update_replaces_the_entries_of_its_cases_and_nothing_else(kind, tmp_path):
    """Runs under other conditions stay; see test_recorded_runs."""
    store = kind.store(tmp_path)
    assert store.get(kind.device, SUITE, KEY) is None
    assert store.update(kind.device, SUITE, _entries(kind)) == tmp_path / kind.folder / "llm.json"
    store.update(kind.device, SUITE, {"new": kind.record, KEY: kind.other})
    after = {**_entries(kind), "new": kind.record, KEY: kind.other}
    assert store.suite(kind.device, SUITE) == after, "what has been read is not kept"
    assert _contents(kind, tmp_path) == after
    file = kind.file(tmp_path)
    before = file.read_bytes()
    store.update("cpu", SUITE, {})
    kind.update(tmp_path, {}, suite="other")
    assert file.read_bytes() == before
    assert file.stat().st_mode & 0o777 == 0o644, "can be read by everyone"
    lines, changed = before.decode().splitlines(), kind.update(tmp_path, {"new": kind.other}).read_text().splitlines()
    assert sum(first != other for first, other in zip(lines, changed, strict=True)) == 1, "no other line changes"


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        (MEASURED, baseline(*(baseline_run(environment=gpu_environment(driver=str(number % 9))) for number in range(10)))),
        (EMULATED, recorded(*(emulated_run(packages={"torch": str(number)}) for number in range(9)))),
    ],
)
def test_what_entries_share_is_stored_once_and_sorted_by_what_refers_to_it(kind, record, tmp_path):
    hashes = list(json.loads(kind.update(tmp_path, {"a": record, "b": record}).read_bytes())[kind.shared])
    assert (len(hashes), hashes) == (9, sorted(hashes))


def test_the_latest_runs_are_kept_and_an_environment_that_no_run_refers_to_is_dropped(tmp_path):
    runs = [baseline_run(warmup=number) for number in range(MAX_RUNS + 2)]
    runs[0] = baseline_run(environment=cpu_environment())
    path = BaselineStore(tmp_path).update(DEVICE, SUITE, {KEY: baseline(*runs)})
    assert BaselineStore(tmp_path).get(DEVICE, SUITE, KEY) == baseline(*runs[2:])
    (environment,) = json.loads(path.read_bytes())["environments"].values()
    assert environment["device_name"] == "NVIDIA H100 80GB HBM3"


@both_kinds
def test_a_folder_that_takes_no_file_is_told_before_and_at_the_end(kind, tmp_path):
    (tmp_path / "file").touch()
    store = kind.store(tmp_path / "file" / "baselines")
    with pytest.raises(BaselineError, match=r"^baselines cannot be written to .+ \(Not a directory\); make it"):
        store.check_writable()
    with pytest.raises(BaselineError, match=r"llm\.json cannot be written: Not a directory$"):
        store.update(kind.device, SUITE, _entries(kind))
    for _ in ("before", "and when it is there"):
        kind.store(tmp_path / "new").check_writable()
    assert not [path for path in (tmp_path / "new").rglob("*") if path.is_file()]


ADD_ENTRIES = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from unit_examples import baseline
from pytest_gputrain.storage.baselines import BaselineStore
print("ready", flush=True)
sys.stdin.readline()
for number in range(12):
    BaselineStore(Path(sys.argv[2])).update("d", "s", {f"{sys.argv[3]}-{number}": baseline()})
"""


def test_updates_of_several_processes_lose_nothing(tmp_path):
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", ADD_ENTRIES, here, str(tmp_path)]
    writers = [
        subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for number in range(3)
    ]
    # All are past their imports before one begins, so that their updates meet.
    assert [writer.stdout.readline() for writer in writers] == ["ready\n"] * 3
    for writer in writers:
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=600)
        assert writer.returncode == 0
    keys = [f"{writer}-{number}" for writer in range(3) for number in range(12)]
    store = BaselineStore(tmp_path)
    assert [key for key in keys if store.get("d", "s", key) is None] == []


@both_kinds
@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{}", b"not json", b'{"format": "2"}', b'{"format": 2, "device": "\xff"}', b"[" * 100_000]
)
def test_what_is_no_baseline_file_is_refused(kind, tmp_path, data):
    _write(kind, tmp_path, data)
    assert _refusal(kind, tmp_path).startswith(f"is not {kind.store.what}")


@both_kinds
def test_a_file_in_the_place_of_another_is_told(kind, tmp_path, snapshot):
    of_another_device = kind.store(tmp_path).update("other", SUITE, _entries(kind))
    kind.update(tmp_path, _entries(kind), suite="other").rename(kind.file(tmp_path))
    said = [_refusal(kind, tmp_path)]
    of_another_device.rename(kind.file(tmp_path))
    assert [*said, _refusal(kind, tmp_path)] == snapshot


def _spoil(kind, folder, place, value):
    """Change the value at a place in a file; a number names a value of an object by its order."""
    document = json.loads(kind.update(folder, _entries(kind)).read_bytes())
    at = document
    for step in place[:-1]:
        at = list(at.values())[step] if isinstance(step, int) and isinstance(at, dict) else at[step]
    at[place[-1]] = value
    _write(kind, folder, json.dumps(document).encode())


IN_CASE, RUN = ("cases", KEY), ("cases", KEY, "runs", 0)
NUMBERS = {
    "step_seconds": [[], [1.0, 0.0], [float("nan")], None],
    "one_worker_seconds": [0.0, -1.0],
    "peak_allocated_bytes": [None, 1.5],
    "outcome": ["guessed"],
    "environment": [1],
}
OF_BOTH = [
    ((*IN_CASE, "scale"), "huge"),
    ((*IN_CASE, "scale"), "tiny"),
]
IMPOSSIBLE = [
    *((kind, *change) for kind in KINDS for change in OF_BOTH),
    *((kind, (kind.shared,), {}) for kind in KINDS),
    *((MEASURED, (*RUN, name), value) for name, values in NUMBERS.items() for value in values),
    (MEASURED, (*IN_CASE, "runs"), []),
    (EMULATED, (*IN_CASE, "runs"), {}),
    (EMULATED, (*RUN, "flops_per_step"), "many"),
    (EMULATED, (*RUN, "peak_reserved_bytes"), 1),
    (EMULATED, (*RUN, "largest", "build", 0, "bytes"), -1),
    (EMULATED, (*RUN, "operators", "aten.mm"), [449, -1, 1]),
]


def test_impossible_figures_are_told(tmp_path, snapshot):
    said = {}
    for kind, place, value in IMPOSSIBLE:
        _spoil(kind, tmp_path, place, value)
        change = f"{kind.name} {'.'.join(map(str, place)).replace(KEY, 'KEY')}={value}"
        said[change] = without_digests(_refusal(kind, tmp_path))
        kind.file(tmp_path).unlink()
    assert said == snapshot


def test_a_result_becomes_its_runs():
    reply = measurement(
        step_seconds=(1.23456789, 2.0),
        peak_reserved_bytes=5,
        flops_per_step=7,
        free_bytes=6,
        one_worker_seconds=0.123456789,
    )
    made = to_baseline(result(replies=(reply,)), date="2026-02-01", session="s", commit="c")
    expected = baseline_run(
        date="2026-02-01",
        session="s",
        commit="c",
        warmup=1,
        step_seconds=(1.23457, 2.0),
        peak_reserved_bytes=5,
        peak_host_bytes=3_000_000_000,
        model_bytes=16_000_000_000,
        flops_per_step=7,
        free_bytes=6,
        one_worker_seconds=0.123457,
    )
    assert made == baseline(expected)


def test_the_runs_of_a_resumed_case_keep_their_origins():
    replies = [measurement(step_seconds=(float(number),)) for number in (1, 2, 3, 4)]
    earlier = [
        Origin(session=f"s{number}", date=f"2026-01-0{number}", commit=f"c{number}", branch="main", runs=runs)
        for number, runs in ((1, 2), (2, 1))
    ]
    resumed = result(replies=tuple(replies), resumed=tuple(earlier))
    runs = to_baseline(resumed, date="2026-02-01", session="s3", commit="c3").runs
    assert [(run.step_seconds, run.date, run.session, run.commit) for run in runs] == [
        ((1.0,), "2026-01-01", "s1", "c1"),
        ((2.0,), "2026-01-01", "s1", "c1"),
        ((3.0,), "2026-01-02", "s2", "c2"),
        ((4.0,), "2026-02-01", "s3", "c3"),
    ]


def test_what_gave_no_figures_is_a_run_only_if_it_ran_out_of_memory():
    case = CASE.replace(steps=99, warmup=0, platforms=("h100",), named=("batch_size",))

    def runs(reply):
        made = to_baseline(result(case, replies=(reply,)), date="d", session="s", commit="c")
        assert made.case == CASE, "without what it is declared for"
        return made.runs

    assert runs(out_of_memory()) == (oom_run(date="d", session="s", commit="c"),)
    assert [runs(reply) for reply in (crashed(), timed_out(), out_of_memory(environment=None))] == [()] * 3


def test_a_report_gives_its_results_as_baselines(tmp_path):
    tiny = result(scale="tiny", key=f"{KEY}@tiny")
    curves = result(key="curves", loss_curves=(LossCurve(precision="bf16", outcome="recorded"),))
    written = report(curves, result(), tiny, result(key="bad", replies=(crashed(),), summary=None))
    json_report.write(written, tmp_path / "old.json")
    store = ReportStore(tmp_path / "old.json")
    assert store.path == tmp_path / "old.json"
    as_baseline = to_baseline(result(), date=written.created, session=written.session, commit=written.commit)
    assert store.get("any-device", SUITE, KEY) == as_baseline
    assert store.get(DEVICE, SUITE, f"{KEY}@tiny") is not None
    assert store.get(DEVICE, SUITE, "bad") is None
    assert store.get(DEVICE, SUITE, "curves") is None, "of other steps than the case's"
    assert store.get(DEVICE, "other", KEY) is None


def test_a_figure_of_measurements_alone_is_none_in_an_emulated_run_and_any_other_name_an_error():
    run = emulated_run()
    assert (run.step_seconds, run.median_step_seconds, run.environment) == (None, None, None)
    with pytest.raises(AttributeError, match="no_such"):
        _ = run.no_such
