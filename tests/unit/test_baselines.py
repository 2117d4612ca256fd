"""Baseline files of both kinds: what goes in comes out, nothing else changes, and what cannot be read is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from unit_examples import (
    CASE,
    KINDS,
    Kind,
    baseline,
    baseline_run,
    cpu_environment,
    crashed,
    gpu_environment,
    measurement,
    oom_run,
    out_of_memory,
    prediction,
    recorded,
    report,
    result,
    timed_out,
    unsigned,
    values_of,
)

from pytest_gputrain.cases.identity import key_of
from pytest_gputrain.records import FORMAT, MAX_RUNS, BaselineRun, Case, Environment, Origin, Prediction
from pytest_gputrain.records.study import LossCurve
from pytest_gputrain.report import json_report
from pytest_gputrain.storage.baselines import BaselineError, BaselineStore
from pytest_gputrain.storage.reports import ReportStore, to_baseline

DEVICE, SUITE, KEY = "nvidia-h100-80gb-hbm3", "llm", str(CASE)
MEASURED, PREDICTED = KINDS
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
    peak_reserved_bytes=FIGURES,
    peak_host_bytes=FIGURES,
    model_bytes=FIGURES,
    flops_per_step=FIGURES,
    final_loss=st.none() | st.floats(-1e9, 1e9),
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
KEYS = NAMES | NAMES.map(lambda name: f"{name}@tiny")


def _scale(key: str) -> Any:
    return "tiny" if key.endswith("@tiny") else "full"


WRITTEN = {
    "measured": st.dictionaries(KEYS, st.lists(RUNS | st.just(oom_run()), min_size=1, max_size=4), max_size=3).map(
        lambda runs: {key: baseline(*of, scale=_scale(key)) for key, of in runs.items()}
    ),
    "predicted": st.dictionaries(KEYS, st.tuples(values_of(Prediction).map(unsigned), values_of(Case)), max_size=2).map(
        lambda made: {key: recorded(of, case=case, scale=_scale(key)) for key, (of, case) in made.items()}
    ),
}


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder of one hypothesis example; ``tmp_path`` is shared by them all."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _entries(kind: Kind) -> dict[str, Any]:
    return {KEY: kind.record, "other": kind.other}


def _contents(kind: Kind, folder: Path) -> dict[str, Any]:
    return dict(kind.store(folder).suite(kind.device, SUITE))


def _write(kind: Kind, folder: Path, data: bytes | str) -> Path:
    path = kind.file(folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def _assert_refused(kind: Kind, folder: Path, *words: str) -> None:
    with pytest.raises(BaselineError) as caught:
        kind.get(folder, KEY)
    sentence = str(caught.value)
    assert len(sentence.splitlines()) == 1
    for part in (str(kind.file(folder)), "record", *words):
        assert part in sentence
    assert caught.value.path == kind.file(folder)


@both_kinds
@settings(max_examples=50)
@given(st.data())
def test_what_is_stored_is_got_back(kind: Kind, data: st.DataObject) -> None:
    entries = data.draw(WRITTEN[kind.name])
    with _folder() as folder:
        kind.update(folder, entries)
        assert _contents(kind, folder) == entries


@both_kinds
def test_the_store_that_wrote_reads_the_same(kind: Kind, tmp_path: Path) -> None:
    store = kind.store(tmp_path)
    assert store.get(kind.device, SUITE, KEY) is None
    store.update(kind.device, SUITE, _entries(kind))
    assert store.suite(kind.device, SUITE) == _entries(kind)


@both_kinds
@settings(max_examples=50)
@given(st.data(), st.randoms(use_true_random=False))
def test_the_same_figures_are_the_same_bytes(kind: Kind, data: st.DataObject, random: Any) -> None:
    entries = data.draw(WRITTEN[kind.name])
    shuffled = list(entries.items())
    random.shuffle(shuffled)
    with _folder() as folder, _folder() as other:
        first = kind.update(folder, entries).read_bytes()
        assert kind.update(other, dict(shuffled)).read_bytes() == first
        assert kind.update(folder, {}).read_bytes() == first
        assert kind.store(folder).rewritten(kind.device, SUITE) == first


@both_kinds
def test_file_lies_by_device_and_suite(kind: Kind, tmp_path: Path) -> None:
    assert kind.update(tmp_path, _entries(kind)) == tmp_path / kind.folder / "llm.json"


@both_kinds
def test_update_keeps_the_other_entries(kind: Kind, tmp_path: Path) -> None:
    kind.update(tmp_path, _entries(kind))
    kind.update(tmp_path, {"new": kind.record})
    assert _contents(kind, tmp_path) == {**_entries(kind), "new": kind.record}


@both_kinds
def test_update_replaces_the_entries_of_its_cases(kind: Kind, tmp_path: Path) -> None:
    """Predictions under other conditions stay; see test_predictions."""
    kind.update(tmp_path, _entries(kind))
    kind.update(tmp_path, {KEY: kind.other})
    assert kind.get(tmp_path, KEY) == kind.other


@both_kinds
def test_update_leaves_other_files_alone(kind: Kind, tmp_path: Path) -> None:
    before = kind.update(tmp_path, _entries(kind)).read_bytes()
    kind.store(tmp_path).update("cpu", SUITE, {})
    kind.update(tmp_path, {}, suite="other")
    assert kind.file(tmp_path).read_bytes() == before


@both_kinds
def test_one_changed_entry_leaves_the_lines_of_the_others(kind: Kind, tmp_path: Path) -> None:
    before = kind.update(tmp_path, {"a": kind.record, "b": kind.record}).read_text().splitlines()
    after = kind.update(tmp_path, {"a": kind.other}).read_text().splitlines()
    assert len(after) == len(before)
    assert sum(first != other for first, other in zip(before, after, strict=True)) == 1


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        (MEASURED, baseline(*(baseline_run(environment=gpu_environment(driver=str(number % 9))) for number in range(10)))),
        (PREDICTED, recorded(*(prediction(packages={"torch": str(number)}) for number in range(9)))),
    ],
)
def test_what_entries_share_is_stored_once_and_sorted_by_what_refers_to_it(kind: Kind, record: Any, tmp_path: Path) -> None:
    path = kind.update(tmp_path, {"a": record, "b": record})
    hashes = list(json.loads(path.read_bytes())[kind.shared])
    assert len(hashes) == 9
    assert hashes == sorted(hashes)


def test_an_environment_no_run_refers_to_is_dropped(tmp_path: Path) -> None:
    BaselineStore(tmp_path).update(DEVICE, SUITE, {KEY: baseline(baseline_run(environment=cpu_environment()))})
    path = BaselineStore(tmp_path).update(DEVICE, SUITE, {KEY: baseline()})
    assert [environment["device_name"] for environment in json.loads(path.read_bytes())["environments"].values()] == [
        "NVIDIA H100 80GB HBM3"
    ]


def test_a_list_of_numbers_is_one_line(tmp_path: Path) -> None:
    run = baseline_run(step_seconds=(0.25, 1e-9, 1e20, 3.0))
    lines = BaselineStore(tmp_path).update(DEVICE, SUITE, {KEY: baseline(run)}).read_text().splitlines()
    assert [line.strip() for line in lines if "step_seconds" in line] == ['"step_seconds": [0.25, 1e-9, 1e20, 3.0],']


def test_a_tensor_is_one_line(tmp_path: Path) -> None:
    lines = PREDICTED.update(tmp_path, {KEY: PREDICTED.record}).read_text().splitlines()
    tensors = [line for line in lines if '"operator":' in line]
    assert len(tensors) == 4
    assert all(line.strip(" ,")[0] + line.strip(" ,")[-1] == "{}" for line in tensors)


@both_kinds
def test_the_file_ends_with_its_line(kind: Kind, tmp_path: Path) -> None:
    assert kind.update(tmp_path, _entries(kind)).read_bytes().endswith(b"}\n")


def test_the_latest_runs_are_kept(tmp_path: Path) -> None:
    runs = [baseline_run(warmup=number) for number in range(MAX_RUNS + 2)]
    BaselineStore(tmp_path).update(DEVICE, SUITE, {KEY: baseline(*runs)})
    assert BaselineStore(tmp_path).get(DEVICE, SUITE, KEY) == baseline(*runs[2:])


@both_kinds
def test_other_devices_with_the_suite_are_known(kind: Kind, tmp_path: Path) -> None:
    store = kind.store(tmp_path)
    for device, suite in (("b", SUITE), ("a", SUITE), (kind.device, SUITE), ("c", "other")):
        store.update(device, suite, _entries(kind))
    assert store.other_devices(kind.device, SUITE) == ["a", "b"]


@pytest.mark.parametrize(("scale", "key"), [("full", KEY), ("tiny", f"{KEY}@tiny")])
def test_tiny_figures_have_keys_of_their_own(scale: Any, key: str) -> None:
    assert key_of(CASE, scale) == key


# Writing


@both_kinds
def test_a_failing_rename_leaves_the_old_file_and_nothing_else(
    kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = kind.update(tmp_path, _entries(kind))
    before = path.read_bytes()

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(BaselineError, match="No space left on device"):
        kind.update(tmp_path, {"new": kind.record})
    assert path.read_bytes() == before
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]


@both_kinds
def test_the_file_is_never_written_in_place_and_can_be_read_by_everyone(kind: Kind, tmp_path: Path) -> None:
    path = kind.update(tmp_path, _entries(kind))
    with path.open("rb") as reader:
        before = path.read_bytes()
        kind.update(tmp_path, {"new": kind.record})
        assert reader.read() == before
    assert path.stat().st_mode & 0o777 == 0o644
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]


@both_kinds
def test_a_file_that_cannot_be_read_is_not_overwritten(kind: Kind, tmp_path: Path) -> None:
    path = _write(kind, tmp_path, "<<<<<<< ours\n{}\n")
    with pytest.raises(BaselineError):
        kind.update(tmp_path, _entries(kind))
    assert path.read_text() == "<<<<<<< ours\n{}\n"


@both_kinds
def test_a_folder_that_cannot_be_is_told_in_one_sentence(kind: Kind, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = kind.store(tmp_path / "file" / "baselines")
    with pytest.raises(BaselineError, match="--gpu-baseline-dir") as checked:
        store.check_writable()
    with pytest.raises(BaselineError, match="cannot be written") as updated:
        store.update(kind.device, SUITE, _entries(kind))
    for error in (checked, updated):
        assert str(store.folder) in str(error.value)
        assert len(str(error.value).splitlines()) == 1


def test_checking_leaves_no_file(tmp_path: Path) -> None:
    for _ in ("before", "and when it is there"):
        BaselineStore(tmp_path / "a" / "new").check_writable()
        assert list((tmp_path / "a" / "new").iterdir()) == []


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder that not even root can write to")
def test_a_folder_that_takes_no_file_is_told_before_anything_is_measured() -> None:
    with pytest.raises(BaselineError, match=r"cannot be written to /proc/self \(.+\); make it .+ --gpu-baseline-dir$"):
        BaselineStore(Path("/proc/self")).check_writable()


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


def test_updates_of_several_processes_lose_nothing(tmp_path: Path) -> None:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", ADD_ENTRIES, here, str(tmp_path)]
    writers = [
        subprocess.Popen([*command, str(number)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for number in range(3)
    ]
    # All are past their imports before one begins, so that their updates meet.
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    for writer in writers:
        writer.communicate(timeout=60)
        assert writer.returncode == 0
    keys = [f"{writer}-{number}" for writer in range(3) for number in range(12)]
    store = BaselineStore(tmp_path)
    assert [key for key in keys if store.get("d", "s", key) is None] == []


# What cannot be read


@both_kinds
@settings(max_examples=50)
@given(st.data())
def test_a_truncated_file_is_equal_or_refused(kind: Kind, data: st.DataObject) -> None:
    with _folder() as folder:
        whole = kind.update(folder, _entries(kind)).read_bytes()
        _write(kind, folder, whole[: data.draw(st.integers(0, len(whole) - 1))])
        try:
            contents = _contents(kind, folder)
        except BaselineError:
            _assert_refused(kind, folder)
        else:
            assert contents == _entries(kind)


@both_kinds
@given(st.data())
@example(None)
def test_a_file_with_a_byte_changed_is_read_or_refused(kind: Kind, data: st.DataObject | None) -> None:
    with _folder() as folder:
        whole = bytearray(kind.update(folder, _entries(kind)).read_bytes())
        place, byte = whole.index(b"llama"), 0xFF
        if data is not None:
            place, byte = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 255))
        whole[place] = byte
        _write(kind, folder, bytes(whole))
        try:
            kind.get(folder, KEY)
        except BaselineError:
            _assert_refused(kind, folder)


@both_kinds
@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "{}", "not json", '{"format": "2"}', f'{{"format": {FORMAT}}}', "\x00", "[" * 100_000),
        b'{"format": %d, "device": "\xff"}' % FORMAT,
    ],
    ids=lambda text: repr(text[:20]),
)
def test_what_is_no_baseline_file_is_refused(kind: Kind, tmp_path: Path, text: str | bytes) -> None:
    _write(kind, tmp_path, text)
    _assert_refused(kind, tmp_path, f"is not {kind.store.what}")


@both_kinds
def test_a_folder_in_place_of_the_file_is_told(kind: Kind, tmp_path: Path) -> None:
    kind.file(tmp_path).mkdir(parents=True)
    with pytest.raises(BaselineError, match="cannot be read"):
        kind.get(tmp_path, KEY)


def _spoil(kind: Kind, folder: Path, place: tuple[Any, ...], value: Any) -> None:
    """Change the value at a place in a file; a number names a value of an object by its order."""
    document = json.loads(kind.update(folder, _entries(kind)).read_bytes())
    at = document
    for step in place[:-1]:
        at = list(at.values())[step] if isinstance(step, int) and isinstance(at, dict) else at[step]
    at[place[-1]] = value
    _write(kind, folder, json.dumps(document))


@both_kinds
def test_a_reference_to_nothing_is_told(kind: Kind, tmp_path: Path) -> None:
    _spoil(kind, tmp_path, (kind.shared,), {})
    _assert_refused(kind, tmp_path, f"refers to the {kind.store.shared} '", KEY)


@both_kinds
@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("case", {"model": "m", "precision": "fp16"}, "the precision 'fp16', which is called 'fp16-amp'"),
        ("scale", "huge", "Invalid enum value 'huge'"),
        ("scale", "tiny", f"gives {KEY} the scale tiny; "),
    ],
)
def test_a_case_that_cannot_be_is_told_by_its_key(kind: Kind, tmp_path: Path, field: str, value: Any, words: str) -> None:
    _spoil(kind, tmp_path, ("cases", KEY, field), value)
    _assert_refused(kind, tmp_path, words, KEY)


@both_kinds
def test_a_case_without_entries_is_told(kind: Kind, tmp_path: Path) -> None:
    _spoil(kind, tmp_path, ("cases", KEY, kind.entries), [] if kind is MEASURED else {})
    _assert_refused(kind, tmp_path, f"holds no {kind.store.entry} for {KEY}; delete the entry and record it again")


@both_kinds
def test_a_file_in_the_place_of_another_is_told(kind: Kind, tmp_path: Path) -> None:
    of_another_device = kind.store(tmp_path).update("other", SUITE, _entries(kind))
    kind.update(tmp_path, _entries(kind), suite="other").rename(kind.file(tmp_path))
    _assert_refused(kind, tmp_path, f"says that it holds other of {kind.device}; move it to where it belongs")
    of_another_device.rename(kind.file(tmp_path))
    _assert_refused(kind, tmp_path, f"says that it holds {SUITE} of other; move it to where it belongs")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step_seconds", []),
        ("step_seconds", [1.0, 0.0]),
        ("step_seconds", [float("nan")]),
        ("step_seconds", [float("inf")]),
        ("step_seconds", None),
        ("one_worker_seconds", 0.0),
        ("one_worker_seconds", -1.0),
        ("peak_allocated_bytes", None),
        ("peak_allocated_bytes", 1.5),
        ("outcome", "guessed"),
        ("environment", 1),
    ],
)
def test_impossible_figures_are_told(tmp_path: Path, name: str, value: Any) -> None:
    _spoil(MEASURED, tmp_path, ("cases", KEY, "runs", 0, name), value)
    _assert_refused(MEASURED, tmp_path)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("flops_per_step",), "many"),
        (("roofline_seconds",), -0.5),
        (("largest", "build", 0, "bytes"), -1),
        (("operators", "aten.mm"), [449, -1, 1]),
    ],
)
def test_impossible_predictions_are_told(tmp_path: Path, place: tuple[Any, ...], value: Any) -> None:
    _spoil(PREDICTED, tmp_path, ("cases", KEY, "predictions", 0, *place), value)
    _assert_refused(PREDICTED, tmp_path, KEY)


@both_kinds
def test_an_error_has_its_path_and_place_as_data(kind: Kind, tmp_path: Path) -> None:
    _spoil(kind, tmp_path, ("cases", "other", "scale"), "tiny")
    with pytest.raises(BaselineError) as caught:
        kind.get(tmp_path, KEY)
    assert (caught.value.path, caught.value.place) == (kind.file(tmp_path), "other")
    assert str(caught.value) == f"{kind.file(tmp_path)} {caught.value.without_path}"
    digest = next(iter(json.loads(kind.update(tmp_path / "new", _entries(kind)).read_bytes())[kind.shared]))
    _spoil(kind, tmp_path / "new", (kind.shared, digest, "packages"), 5)
    with pytest.raises(BaselineError) as caught:
        kind.get(tmp_path / "new", KEY)
    assert caught.value.place == digest


# Results as baselines


def test_a_result_becomes_its_runs() -> None:
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
        final_loss=1.0,
    )
    assert made == baseline(expected)


def test_own_code_without_losses_has_no_final_one() -> None:
    (run,) = to_baseline(result(replies=(measurement(losses=()),)), date="d", session="s", commit="").runs
    assert run.final_loss is None


def test_the_runs_of_a_resumed_case_keep_their_origins() -> None:
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


def test_running_out_of_memory_becomes_a_run() -> None:
    assert to_baseline(result(replies=(out_of_memory(),)), date="d", session="s", commit="c").runs == (
        oom_run(date="d", session="s", commit="c"),
    )


@pytest.mark.parametrize("reply", [crashed(), timed_out(), out_of_memory(environment=None)])
def test_what_gave_no_figures_becomes_no_run(reply: Any) -> None:
    assert to_baseline(result(replies=(reply,)), date="d", session="s", commit="").runs == ()


def test_what_a_case_is_declared_for_is_not_stored() -> None:
    case = CASE.replace(steps=99, warmup=0, platforms=("h100",), named=("batch_size",))
    assert to_baseline(result(case), date="d", session="s", commit="").case == CASE


def test_a_report_gives_its_results_as_baselines(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("text", ["", "{}", '{"format": 9}', json.dumps({"format": FORMAT, "device": "cpu"}), "\x00"])
def test_what_is_no_report_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "old.json").write_text(text)
    with pytest.raises(BaselineError) as caught:
        ReportStore(tmp_path / "old.json")
    assert str(tmp_path / "old.json") in str(caught.value)
    assert str(caught.value).endswith("give the file that --gpu-json wrote")
    assert len(str(caught.value).splitlines()) == 1


def test_a_baseline_file_is_no_report(tmp_path: Path) -> None:
    path = MEASURED.update(tmp_path, {KEY: baseline()})
    with pytest.raises(BaselineError, match="not a report of --gpu-json"):
        ReportStore(path)


def test_an_environment_of_an_earlier_version_is_stored_again_as_it_was(tmp_path: Path) -> None:
    """Else an update of one case would change the reference of every other in the diff."""
    source = next((Path(__file__).parents[2] / "baselines" / "cpu").glob("*.json"))
    (tmp_path / "cpu").mkdir()
    copy = tmp_path / "cpu" / source.name
    copy.write_bytes(source.read_bytes())
    store = BaselineStore(tmp_path)
    key = next(iter(json.loads(copy.read_text())["cases"]))
    record = store.get("cpu", source.stem, key)
    assert record is not None
    store.update("cpu", source.stem, {key: record})
    assert copy.read_bytes() == source.read_bytes()
