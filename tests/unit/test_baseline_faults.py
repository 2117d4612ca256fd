"""What can become of a baseline file, on disk and by others' hands: it stays whole, and nothing is written elsewhere."""

import json
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from unit_examples import CASE, KINDS, baseline, baseline_run, crashed, emulated_run, report, result, without_digests

from pytest_gputrain.cli.check_baselines import check
from pytest_gputrain.records import FORMAT, BaselineRun, EmulatedRun, HistoryLine
from pytest_gputrain.report import json_report
from pytest_gputrain.report.history_lines import lines_of
from pytest_gputrain.report.trend.reading import Filter, History
from pytest_gputrain.storage.baselines import BaselineError, BaselineStore
from pytest_gputrain.storage.history import append, read
from pytest_gputrain.storage.reports import read_report
from pytest_gputrain.utils.files import conflicts, locked
from pytest_gputrain.utils.git import RunInfo

DEVICE, SUITE, KEY = "nvidia-h100-80gb-hbm3", "llm", str(CASE)
MEASURED, EMULATED = KINDS
ENTRIES = {KEY: baseline(baseline_run())}
MORE = {f"{KEY}-steps={steps}": baseline(baseline_run(step_seconds=(1.0,) * 99)) for steps in range(9)}
SAMPLES = sorted((Path(__file__).parent / "samples").iterdir())
"""Files of each format that this version reads."""


@pytest.fixture(params=KINDS, ids=lambda kind: kind.name)
def kind(request):
    return request.param


@pytest.fixture
def file(kind, tmp_path):
    """A sound baseline file of either kind in a folder of baselines."""
    return kind.update(tmp_path / "baselines", {KEY: kind.record})


@pytest.fixture
def measured_file(tmp_path):
    return MEASURED.update(tmp_path / "baselines", ENTRIES)


def _refusal(kind, folder):
    """The one sentence that both reading and updating a file fail with, which leaves it as it is."""
    path = kind.file(folder)
    before = path.read_bytes() if path.is_file() else b""
    sentences = set()
    for use in (lambda: kind.get(folder, KEY), lambda: kind.update(folder, {KEY: kind.record})):
        with pytest.raises(BaselineError) as caught:
            use()
        sentences.add(str(caught.value))
    (sentence,) = sentences
    assert len(sentence.splitlines()) == 1
    assert before == (path.read_bytes() if path.is_file() else b"")
    return sentence


def _files(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_conflict_markers_are_told_by_line(kind, tmp_path, file, ending):
    lines = file.read_bytes().splitlines()
    marked = [*lines[:3], b"<<<<<<< HEAD", lines[3], b"||||||| base", b"=======", lines[4], b">>>>>>> theirs", *lines[5:]]
    file.write_bytes(ending.join(marked))
    assert "merge-conflict markers (lines 4, 6, 7, 9); resolve them" in _refusal(kind, tmp_path / "baselines")
    file.write_bytes(b"=======\n" * 50)
    assert "(lines 1, 2, 3, 4, 5, 6, ...)" in _refusal(kind, tmp_path / "baselines")
    assert conflicts(b'<<<<<<<<\n ======= \n"=======",\n>>>>>>>x\n') == [], "these only look like markers"


def _change(file, *place, **fields):
    document = json.loads(file.read_bytes())
    at = document
    for step in place:
        at = list(at.values())[step] if isinstance(step, int) and isinstance(at, dict) else at[step]
    at |= fields
    file.write_text(json.dumps(document))


def test_a_case_with_a_knob_of_tomorrow_and_other_formats_are_refused(kind, tmp_path, file, snapshot):
    """The knob makes it another case, which this version cannot run."""
    sound, said = file.read_bytes(), {}
    _change(file, "cases", KEY, "case", of_tomorrow=1)
    said["a knob of tomorrow"] = _refusal(kind, tmp_path / "baselines")
    file.write_bytes(sound)
    _change(file, format=0)
    said["format 0"] = _refusal(kind, tmp_path / "baselines")
    file.write_bytes(sound)
    _change(file, "cases", KEY, kind.entries, 0, peak_allocated_bytes="much")
    said["much memory"] = _refusal(kind, tmp_path / "baselines")
    file.write_text(json.dumps({"format": FORMAT + 1, "all": "different"}))
    said["the next format"] = _refusal(kind, tmp_path / "baselines")
    assert {what: without_digests(sentence.removeprefix(str(file))) for what, sentence in said.items()} == snapshot


def _records(stored, made, at=()):
    """Yield the places of records in JSON, which is what `made` was made of."""
    if isinstance(made, msgspec.Struct) and isinstance(stored, dict):
        yield at
        made = msgspec.structs.asdict(made)
    if isinstance(stored, dict) and isinstance(made, dict):
        for name, value in stored.items():
            yield from _records(value, made.get(name), (*at, name))
    elif isinstance(stored, list) and isinstance(made, list | tuple):
        for number, (value, one) in enumerate(zip(stored, made, strict=True)):
            yield from _records(value, one, (*at, number))


def _places(kind, document):
    """Where a newer version could add fields: to the file, a case, what entries share, an entry, and the records in it."""
    stored = document["cases"][KEY]
    entries = kind.record.runs if kind is MEASURED else kind.record.figures
    if kind is EMULATED:
        entries = dict(zip(stored["runs"], entries, strict=True))
    return [
        *[(), ("cases", KEY), *((kind.shared, reference) for reference in document[kind.shared])],
        *(("cases", KEY, kind.entries, *place) for place in _records(stored[kind.entries], entries)),
    ]


def _without_references(kind, document):
    """The document with what entries share in its place: the references are digests, which change with it."""
    shared = document.pop(kind.shared)
    for case in document["cases"].values():
        entries = case[kind.entries]
        case[kind.entries] = (
            [{**entry, "environment": shared[entry["environment"]]} for entry in entries]
            if kind is MEASURED
            else [[shared[reference], entry] for reference, entry in entries.items()]
        )
    return document


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=ANYTHING, name=st.text().map("of_tomorrow{}".format))
def test_fields_of_a_newer_version_are_passed_over_and_kept(kind, tmp_path, data, value, name):
    folder = Path(tempfile.mkdtemp(dir=tmp_path))
    file = kind.update(folder, {KEY: kind.record})
    place = data.draw(st.sampled_from(_places(kind, json.loads(file.read_bytes()))))
    _change(file, *place, **{name: value})
    before = _without_references(kind, json.loads(file.read_bytes()))
    assert kind.get(folder, KEY) == kind.record
    assert any(f"{name!r} is unknown to this version" in problem.sentence and not problem.error for problem in check(folder))
    for key in ("another", "a-third"):
        kind.update(folder, {key: kind.other})
    after = _without_references(kind, json.loads(file.read_bytes()))
    assert {after["cases"].pop(key)["scale"] for key in ("another", "a-third")} == {"full"}
    assert after == before
    assert kind.get(folder, KEY) == kind.record
    assert not any(problem.error for problem in check(folder) if "is not the name of the case" not in problem.sentence)
    kind.update(folder, {KEY: kind.other})
    is_there = repr(name) in repr(json.loads(file.read_bytes()))
    assert is_there == (not place), "it goes with the runs that are replaced, unless it is the file's"


def test_fields_of_a_newer_version_in_reports_and_histories_are_passed_over(tmp_path):
    """Nothing writes these again: a report is written anew, and a history only grows at its end."""
    path = tmp_path / "report.json"
    every = (result(), result(reply=emulated_run(), device="emulated/h100"), result(replies=(crashed(),), summary=None))
    json_report.write(report(*every), path)
    sound, read_sound = path.read_bytes(), read_report(path)
    places = [place for place in _records(json.loads(sound), read_sound) if place[2:3] != ("case",)]
    assert len(places) > 10
    for place in places:
        _change(path, *place, of_tomorrow=1)
        assert read_report(path) == read_sound, place
        path.write_bytes(sound)
    history = tmp_path / "history.jsonl"
    line = lines_of([result()], RunInfo(id="s", created="2026-01-01T00:00:00Z", commit="c", branch="main"))[0]
    history.write_text(json.dumps({**msgspec.to_builtins(line), "of_tomorrow": [1]}) + "\n")
    before = history.read_bytes()
    append(history, [line])
    assert history.read_bytes().startswith(before)
    assert [found for _, found in read(history, HistoryLine, pytest.fail)] == [line, line]


def test_no_count_is_negative(kind, tmp_path, file):
    type_ = BaselineRun if kind is MEASURED else EmulatedRun
    counts = {name for name, annotation in type_.__annotations__.items() if str(annotation).startswith("Whole")}
    assert len(counts) > 5
    sound = file.read_bytes()
    for name in counts - {"processes", "device_memory_bytes"}:
        _change(file, "cases", KEY, kind.entries, 0, **{name: -1})
        assert f"impossible figures for {KEY}" in _refusal(kind, tmp_path / "baselines"), name
        file.write_bytes(sound)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_what_earlier_versions_wrote_is_read_and_kept_by_an_update(tmp_path, sample):
    """A folder is named after its format, and after the version that wrote it where there were several."""
    assert {int(each.name.split("-")[1]) for each in SAMPLES} == {*range(2, FORMAT + 1)}, "format 1 was never released"
    assert [result.key for result in read_report(sample / "report.json").results] == [KEY, "other", "third"]
    read = History([sample / "history.jsonl"], ["median_step_seconds", "peak_allocated_bytes"], Filter(), pytest.fail)
    assert sorted(subject.key for subject in read.series) == [KEY, "other", "third"]
    measured, emulated = before = [kind.get(sample / "baselines", KEY) for kind in KINDS]
    assert [run.session for run in measured.runs] == ["abc123", "s2"]
    assert [run.peak_allocated_bytes for run in emulated.figures] == [32 << 30]
    shutil.copytree(sample / "baselines", tmp_path / "baselines")
    for kind in KINDS:
        kind.update(tmp_path / "baselines", {"new": kind.record})
    assert [kind.get(tmp_path / "baselines", KEY) for kind in KINDS] == before


def test_a_read_only_file_stays(kind, tmp_path, file):
    file.chmod(0o444)
    before = file.read_bytes()
    with pytest.raises(BaselineError, match=r"llm\.json cannot be written: it is read-only"):
        kind.update(tmp_path / "baselines", {KEY: kind.record})
    assert (file.read_bytes(), stat.S_IMODE(file.stat().st_mode)) == (before, 0o444)


def test_a_lock_that_cannot_be_is_told_as_such(kind, tmp_path, monkeypatch, no_locks_of_folders):
    (tmp_path / "no-folder").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no-folder"))
    with pytest.raises(BaselineError, match=r"llm\.json cannot be written: no lock in .*no-folder.*: Not a directory"):
        kind.update(tmp_path / "baselines", {KEY: kind.record})


_PRELUDE = """
import os, resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_baseline_faults import DEVICE, MORE, SUITE
from unit_examples import report, result
from pytest_gputrain.storage.baselines import BaselineError, BaselineStore
from pytest_gputrain.report import json_report as document

folder = Path(sys.argv[2])

def both():
    failed = 0
    try:
        BaselineStore(folder).update(DEVICE, SUITE, MORE)
    except BaselineError as error:
        print(error)
        failed += 1
    try:
        document.write(report(*[result()] * 9), folder / DEVICE / "report.json")
    except OSError as error:
        print(error)
        failed += 1
    sys.exit(failed)
"""


def _run(code, folder):
    command = [sys.executable, "-c", _PRELUDE + code, str(Path(__file__).parent), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_files_that_may_not_grow_leave_the_old_ones(measured_file):
    before = _files(measured_file.parents[1])
    done = _run("resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); both()", measured_file.parents[1])
    assert done.returncode == 2, done.stderr
    assert "llm.json cannot be written: File too large" in done.stdout
    assert _files(measured_file.parents[1]) == before


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_kill_before_the_rename_leaves_the_old_file_and_nothing_for_the_next(measured_file, moment):
    folder = measured_file.parents[1]
    before = measured_file.read_bytes()
    done = _run(f"os.{moment} = lambda *_: os.kill(os.getpid(), 9); both()", folder)
    assert done.returncode == -signal.SIGKILL
    assert measured_file.read_bytes() == before
    assert len(_files(folder)) == 2, "the new file, without its name"
    assert [finding for finding in check(folder) if finding.error] == []
    assert BaselineStore(folder).other_devices("other", SUITE) == [DEVICE]
    BaselineStore(folder).update(DEVICE, SUITE, MORE)
    assert [*_files(folder)] == [measured_file]
    assert all(BaselineStore(folder).get(DEVICE, SUITE, key) == entry for key, entry in {**ENTRIES, **MORE}.items())


def test_what_is_swept_is_of_the_same_file_only(measured_file):
    others = [measured_file.with_name(name) for name in (".llm2.json.x.part", "llm.json.part", ".llm.json.swp")]
    for other in others:
        other.touch()
    BaselineStore(measured_file.parents[1]).update(DEVICE, SUITE, MORE)
    assert all(other.exists() for other in others)


def test_two_names_of_a_folder_share_a_lock_whatever_the_folder_for_temporary_files(tmp_path, monkeypatch):
    """Slurm gives each job a TMPDIR of its own, and a container has its own /tmp."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    entered = threading.Event()

    def enter():
        with locked(tmp_path / "link" / "file"):
            entered.set()

    second = threading.Thread(target=enter)
    with locked(tmp_path / "folder" / "file"):
        (tmp_path / "other").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "other"))
        second.start()
        assert not entered.wait(0.3)
    second.join(timeout=600)
    assert entered.is_set()


@pytest.fixture
def elsewhere(tmp_path):
    """A folder that is none of the baselines', with files in it."""
    folder = tmp_path / "elsewhere"
    for kind in KINDS:
        kind.update(folder, {KEY: kind.record})
    return folder


@pytest.mark.parametrize(
    ("kind", "linked"),
    [
        (MEASURED, DEVICE),
        (MEASURED, f"{DEVICE}/{SUITE}.json"),
        (EMULATED, "emulated"),
        (EMULATED, "emulated/h100"),
        (EMULATED, f"emulated/h100/{SUITE}.json"),
    ],
)
def test_a_link_out_of_the_folder_is_refused(kind, tmp_path, elsewhere, linked):
    link = tmp_path / "baselines" / linked
    link.parent.mkdir(parents=True)
    link.symlink_to(elsewhere / linked)
    before = _files(elsewhere)
    sentence = _refusal(kind, tmp_path / "baselines")
    assert f"baselines stay in {tmp_path / 'baselines'}: " in sentence
    assert f"is a link to {elsewhere}" in sentence
    assert _files(elsewhere) == before
    assert link.is_symlink()
    (tmp_path / DEVICE).symlink_to(DEVICE)
    assert DEVICE in _refusal(MEASURED, tmp_path), "a circle"


def test_a_folder_of_baselines_that_is_itself_a_link_serves(tmp_path, elsewhere):
    (tmp_path / "baselines").symlink_to(elsewhere)
    BaselineStore(tmp_path / "baselines").update(DEVICE, SUITE, MORE)
    assert BaselineStore(elsewhere).get(DEVICE, SUITE, KEY) == ENTRIES[KEY]
    assert BaselineStore(elsewhere).suite(DEVICE, SUITE).keys() == {KEY, *MORE}


PIECES = st.sampled_from([".", "..", "/", "\0", "a", "json", ".json", "~", "*", "[a]", " ", "\n", "\\", "é"])
NAMES = st.lists(PIECES, max_size=5).map("".join)


@settings(max_examples=150)
@given(NAMES, NAMES, NAMES)
@example("..", "a", "a")
@example("/a", "a", "../../a")
@example("a", "../../a", "a/b")
@example("a", "", "")
@example("a", "..", "..")
def test_no_name_leads_out_of_the_folder(device, suite, key):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "deep", "baselines")
        folder.mkdir(parents=True)
        for kind in KINDS:
            refusal = ""
            try:
                kind.store(folder).update(device, suite, {key: kind.record})
            except BaselineError as error:
                refusal = str(error)
            assert len(refusal.splitlines()) <= 1
        written = [path.relative_to(folder) for path in Path(name).rglob("*") if path.is_file()]
        assert {len(path.parts) for path in written} <= {2, 3}
        if written:
            stored = BaselineStore(folder).get(device, suite, key)
            assert stored.runs == (baseline_run(),)


def test_other_devices_with_the_suite_are_known_and_suites_are_not_patterns(tmp_path):
    BaselineStore(tmp_path).update("one", "a", ENTRIES)
    assert BaselineStore(tmp_path).other_devices("two", "[a]") == []
    for device in ("one", "two", "also"):
        BaselineStore(tmp_path).update(device, "[a]", ENTRIES)
    assert BaselineStore(tmp_path).other_devices("two", "[a]") == ["also", "one"]
