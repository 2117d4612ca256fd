"""Baseline files: what goes in comes out, nothing else changes, and what cannot be read is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from unit_examples import (
    CASE,
    baseline,
    baseline_run,
    cpu_environment,
    crashed,
    gpu_environment,
    measurement,
    oom_run,
    out_of_memory,
    report,
    result,
    timed_out,
    values_of,
)

from pytest_gputrain.cases.identity import key_of
from pytest_gputrain.records import MAX_RUNS, Baseline, BaselineRun, Environment, Origin
from pytest_gputrain.records.study import LossCurve
from pytest_gputrain.report import json_report
from pytest_gputrain.storage.baselines import BaselineError, BaselineStore
from pytest_gputrain.storage.reports import ReportStore, to_baseline

DEVICE, SUITE, KEY = "nvidia-h100-80gb-hbm3", "llm", str(CASE)
ENTRIES = {KEY: baseline(baseline_run(), baseline_run(session="s2")), "other": baseline(oom_run())}

FIGURES = st.none() | st.integers(0, 2**63 - 1)
RUNS = st.builds(
    BaselineRun,
    outcome=st.just("measured"),
    environment=st.sampled_from([gpu_environment(), gpu_environment(driver="1")]) | values_of(Environment),
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
WRITTEN = st.dictionaries(KEYS, st.lists(RUNS | st.just(oom_run()), min_size=1, max_size=4), max_size=3).map(
    lambda runs: {key: baseline(*of, scale="tiny" if key.endswith("@tiny") else "full") for key, of in runs.items()}
)


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder of one hypothesis example; ``tmp_path`` is shared by them all."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def _contents(folder: Path, keys: Mapping[str, Any]) -> dict[str, Baseline | None]:
    store = BaselineStore(folder)
    return {key: store.get(DEVICE, SUITE, key) for key in keys}


def _write(folder: Path, data: bytes | str) -> Path:
    path = BaselineStore(folder).path(DEVICE, SUITE)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def _valid(folder: Path) -> dict[str, Any]:
    """The file of `ENTRIES` as plain JSON values, to be spoilt."""
    fields: dict[str, Any] = json.loads(BaselineStore(folder).update(DEVICE, SUITE, ENTRIES).read_bytes())
    return fields


def _assert_refused(folder: Path, *words: str) -> None:
    with pytest.raises(BaselineError) as caught:
        BaselineStore(folder).get(DEVICE, SUITE, KEY)
    sentence = str(caught.value)
    assert len(sentence.splitlines()) == 1
    for part in (str(BaselineStore(folder).path(DEVICE, SUITE)), "record", *words):
        assert part in sentence


@given(WRITTEN)
def test_what_is_stored_is_got_back(entries: dict[str, Baseline]) -> None:
    with _folder() as folder:
        BaselineStore(folder).update(DEVICE, SUITE, entries)
        assert _contents(folder, entries) == entries


def test_the_store_that_wrote_reads_the_same() -> None:
    with _folder() as folder:
        store = BaselineStore(folder)
        assert store.get(DEVICE, SUITE, KEY) is None
        store.update(DEVICE, SUITE, ENTRIES)
        assert store.get(DEVICE, SUITE, KEY) == ENTRIES[KEY]


@given(WRITTEN, st.randoms(use_true_random=False))
def test_the_same_figures_are_the_same_bytes(entries: dict[str, Baseline], random: Any) -> None:
    shuffled = list(entries.items())
    random.shuffle(shuffled)
    with _folder() as folder, _folder() as other:
        first = BaselineStore(folder).update(DEVICE, SUITE, entries).read_bytes()
        assert BaselineStore(other).update(DEVICE, SUITE, dict(shuffled)).read_bytes() == first
        assert BaselineStore(folder).update(DEVICE, SUITE, {}).read_bytes() == first


def test_file_lies_by_device_and_suite(tmp_path: Path) -> None:
    assert BaselineStore(tmp_path).update(DEVICE, SUITE, ENTRIES) == tmp_path / "nvidia-h100-80gb-hbm3" / "llm.json"


def test_update_keeps_the_other_entries(tmp_path: Path) -> None:
    BaselineStore(tmp_path).update(DEVICE, SUITE, ENTRIES)
    BaselineStore(tmp_path).update(DEVICE, SUITE, {"new": baseline()})
    assert _contents(tmp_path, {**ENTRIES, "new": 0}) == {**ENTRIES, "new": baseline()}


def test_update_replaces_all_runs_of_its_entries(tmp_path: Path) -> None:
    BaselineStore(tmp_path).update(DEVICE, SUITE, ENTRIES)
    BaselineStore(tmp_path).update(DEVICE, SUITE, {KEY: baseline(baseline_run(step_seconds=(9.0,)))})
    assert BaselineStore(tmp_path).get(DEVICE, SUITE, KEY) == baseline(baseline_run(step_seconds=(9.0,)))


def test_update_leaves_other_files_alone(tmp_path: Path) -> None:
    before = BaselineStore(tmp_path).update(DEVICE, SUITE, ENTRIES).read_bytes()
    BaselineStore(tmp_path).update("cpu", SUITE, {})
    BaselineStore(tmp_path).update(DEVICE, "other", {})
    assert BaselineStore(tmp_path).path(DEVICE, SUITE).read_bytes() == before


def test_one_changed_entry_leaves_the_lines_of_the_others(tmp_path: Path) -> None:
    before = BaselineStore(tmp_path).update(DEVICE, SUITE, {"a": baseline(), "b": baseline()}).read_text().splitlines()
    changed = baseline(baseline_run(step_seconds=(9.0,)))
    after = BaselineStore(tmp_path).update(DEVICE, SUITE, {"a": changed}).read_text().splitlines()
    assert len(after) == len(before)
    assert sum(first != other for first, other in zip(before, after, strict=True)) == 1


def test_an_environment_is_stored_once(tmp_path: Path) -> None:
    environments = [gpu_environment(), gpu_environment(), gpu_environment(driver="1")]
    runs = [baseline_run(environment=environment) for environment in environments]
    path = BaselineStore(tmp_path).update(DEVICE, SUITE, {"a": baseline(*runs), "b": baseline(*runs)})
    assert len(json.loads(path.read_bytes())["environments"]) == 2


def test_environments_are_sorted_by_what_refers_to_them(tmp_path: Path) -> None:
    runs = [baseline_run(environment=gpu_environment(driver=str(number))) for number in range(9)]
    path = BaselineStore(tmp_path).update(DEVICE, SUITE, {KEY: baseline(*runs)})
    hashes = list(json.loads(path.read_bytes())["environments"])
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


def test_the_file_ends_with_its_line(tmp_path: Path) -> None:
    assert BaselineStore(tmp_path).update(DEVICE, SUITE, ENTRIES).read_bytes().endswith(b"}\n")


def test_the_latest_runs_are_kept(tmp_path: Path) -> None:
    runs = [baseline_run(warmup=number) for number in range(MAX_RUNS + 2)]
    BaselineStore(tmp_path).update(DEVICE, SUITE, {KEY: baseline(*runs)})
    assert BaselineStore(tmp_path).get(DEVICE, SUITE, KEY) == baseline(*runs[2:])


def test_other_devices_with_the_suite_are_known(tmp_path: Path) -> None:
    for device, suite in (("b", SUITE), ("a", SUITE), (DEVICE, SUITE), ("c", "other")):
        BaselineStore(tmp_path).update(device, suite, ENTRIES)
    assert BaselineStore(tmp_path).other_devices(DEVICE, SUITE) == ["a", "b"]
    assert BaselineStore(tmp_path).has_device("c")
    assert not BaselineStore(tmp_path).has_device("d")


@pytest.mark.parametrize(("scale", "key"), [("full", KEY), ("tiny", f"{KEY}@tiny")])
def test_tiny_figures_have_keys_of_their_own(scale: Any, key: str) -> None:
    assert key_of(CASE, scale) == key


# Writing


def test_a_failing_rename_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = BaselineStore(tmp_path).update(DEVICE, SUITE, ENTRIES)
    before = path.read_bytes()

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(BaselineError, match="No space left on device"):
        BaselineStore(tmp_path).update(DEVICE, SUITE, {"new": baseline()})
    assert path.read_bytes() == before
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]


def test_the_file_is_never_written_in_place(tmp_path: Path) -> None:
    path = BaselineStore(tmp_path).update(DEVICE, SUITE, ENTRIES)
    with path.open("rb") as reader:
        before = path.read_bytes()
        BaselineStore(tmp_path).update(DEVICE, SUITE, {"new": baseline()})
        assert reader.read() == before


def test_the_file_can_be_read_by_everyone(tmp_path: Path) -> None:
    assert BaselineStore(tmp_path).update(DEVICE, SUITE, ENTRIES).stat().st_mode & 0o777 == 0o644


def test_an_update_leaves_nothing_beside_the_file(tmp_path: Path) -> None:
    path = BaselineStore(tmp_path).update(DEVICE, SUITE, ENTRIES)
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]


def test_a_file_that_cannot_be_read_is_not_overwritten(tmp_path: Path) -> None:
    path = _write(tmp_path, "<<<<<<< ours\n{}\n")
    with pytest.raises(BaselineError):
        BaselineStore(tmp_path).update(DEVICE, SUITE, ENTRIES)
    assert path.read_text() == "<<<<<<< ours\n{}\n"


def test_a_folder_that_cannot_be_is_told_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = BaselineStore(tmp_path / "file" / "baselines")
    with pytest.raises(BaselineError, match="--gpu-baseline-dir") as checked:
        store.check_writable()
    with pytest.raises(BaselineError, match="cannot be written") as updated:
        store.update(DEVICE, SUITE, ENTRIES)
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


@given(st.data())
def test_a_truncated_file_is_equal_or_refused(data: st.DataObject) -> None:
    with _folder() as folder:
        whole = BaselineStore(folder).update(DEVICE, SUITE, ENTRIES).read_bytes()
        _write(folder, whole[: data.draw(st.integers(0, len(whole) - 1))])
        try:
            contents = _contents(folder, ENTRIES)
        except BaselineError:
            _assert_refused(folder)
        else:
            assert contents == ENTRIES


@given(st.data())
@example(None)
def test_a_file_with_a_byte_changed_is_read_or_refused(data: st.DataObject | None) -> None:
    with _folder() as folder:
        whole = bytearray(BaselineStore(folder).update(DEVICE, SUITE, ENTRIES).read_bytes())
        place, byte = whole.index(b"EPYC"), 0xFF
        if data is not None:
            place, byte = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 255))
        whole[place] = byte
        _write(folder, bytes(whole))
        try:
            BaselineStore(folder).get(DEVICE, SUITE, KEY)
        except BaselineError:
            _assert_refused(folder)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", "{}", "not json", '{"format": "1"}', '{"format": 1}', "\x00", "[" * 100_000],
    ids=lambda text: repr(text[:20]),
)
def test_what_is_no_baseline_file_is_refused(tmp_path: Path, text: str) -> None:
    _write(tmp_path, text)
    _assert_refused(tmp_path)


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, b'{"format": 1, "device": "\xff"}')
    _assert_refused(tmp_path)


def test_a_folder_in_place_of_the_file_is_told(tmp_path: Path) -> None:
    BaselineStore(tmp_path).path(DEVICE, SUITE).mkdir(parents=True)
    with pytest.raises(BaselineError, match="cannot be read"):
        BaselineStore(tmp_path).get(DEVICE, SUITE, KEY)


@pytest.mark.parametrize("marker", ["<<<<<<< HEAD", "=======", ">>>>>>> branch"])
def test_merge_conflicts_are_told(tmp_path: Path, marker: str) -> None:
    lines = BaselineStore(tmp_path).update(DEVICE, SUITE, ENTRIES).read_text().splitlines()
    _write(tmp_path, "\n".join([*lines[:5], marker, *lines[5:]]))
    _assert_refused(tmp_path, "merge-conflict markers", "resolve them")


def test_a_newer_format_is_told_even_if_its_fields_are_unknown(tmp_path: Path) -> None:
    _write(tmp_path, json.dumps({"format": 2, "all": "different"}))
    _assert_refused(tmp_path, "format 2", "reads format 1")


def _spoil(fields: dict[str, Any], place: tuple[Any, ...], value: Any) -> None:
    for step in place[:-1]:
        fields = fields[step]
    fields[place[-1]] = value


RUN = ("cases", KEY, "runs", 0)


@pytest.mark.parametrize(
    "place", [("surprise",), ("cases", KEY, "surprise"), ("cases", KEY, "case", "surprise"), (*RUN, "surprise")]
)
def test_an_unknown_field_is_told(tmp_path: Path, place: tuple[Any, ...]) -> None:
    fields = _valid(tmp_path)
    _spoil(fields, place, 1)
    _write(tmp_path, json.dumps(fields))
    _assert_refused(tmp_path, "surprise")


def test_a_missing_environment_is_told(tmp_path: Path) -> None:
    fields = _valid(tmp_path)
    fields["environments"] = {}
    _write(tmp_path, json.dumps(fields))
    _assert_refused(tmp_path, "environment", KEY)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((*RUN, "step_seconds"), []),
        ((*RUN, "step_seconds"), [1.0, 0.0]),
        ((*RUN, "step_seconds"), [-1.0]),
        ((*RUN, "step_seconds"), [float("nan")]),
        ((*RUN, "step_seconds"), [float("inf")]),
        ((*RUN, "step_seconds"), None),
        ((*RUN, "one_worker_seconds"), 0.0),
        ((*RUN, "one_worker_seconds"), -1.0),
        ((*RUN, "peak_allocated_bytes"), -1),
        ((*RUN, "peak_allocated_bytes"), 1.5),
        ((*RUN, "outcome"), "guessed"),
        ((*RUN, "environment"), 1),
        (("cases", KEY, "runs"), []),
        (("cases", KEY, "scale"), "huge"),
    ],
)
def test_impossible_figures_are_told(tmp_path: Path, place: tuple[Any, ...], value: Any) -> None:
    fields = _valid(tmp_path)
    _spoil(fields, place, value)
    _write(tmp_path, json.dumps(fields))
    _assert_refused(tmp_path)


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


@pytest.mark.parametrize("text", ["", "{}", '{"format": 9}', json.dumps({"format": 1, "device": "cpu"}), "\x00"])
def test_what_is_no_report_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "old.json").write_text(text)
    with pytest.raises(BaselineError) as caught:
        ReportStore(tmp_path / "old.json")
    assert str(tmp_path / "old.json") in str(caught.value)
    assert str(caught.value).endswith("give the file that --gpu-json wrote")
    assert len(str(caught.value).splitlines()) == 1


def test_a_baseline_file_is_no_report(tmp_path: Path) -> None:
    path = BaselineStore(tmp_path).update(DEVICE, SUITE, ENTRIES)
    with pytest.raises(BaselineError, match="not a report of --gpu-json"):
        ReportStore(path)
