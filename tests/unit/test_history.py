"""The history: what a line says, and that no crash and no other writer spoils the file."""

import importlib
import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import msgspec
import pytest
from unit_examples import CASE, crashed, emulated_run, gpu_environment, measurement, out_of_memory, result, timed_out

from pytest_gputrain.records import Case, Counts, HistoryLine, MetricVerdict, StepCounts, Verdict
from pytest_gputrain.records.history import COUNT_KEYS
from pytest_gputrain.records.study import Search
from pytest_gputrain.report.history_lines import lines_of
from pytest_gputrain.report.trend.reading import Filter, History
from pytest_gputrain.storage import history
from pytest_gputrain.storage.history import HistoryError, append, read
from pytest_gputrain.utils.git import RunInfo

DOCS = Path(__file__).parents[2] / "docs"
SESSION = RunInfo(id="s1", created="2026-02-01T00:00:00Z", commit="c0ffee", branch="main")
LINE = lines_of([result()], SESSION)[0]

_PRELUDE = """
import os, resource, sys
from pathlib import Path
import msgspec
from pytest_gputrain.storage.history import append
from pytest_gputrain.records import HistoryLine

print("ready", flush=True)
line = msgspec.json.decode(sys.stdin.buffer.readline(), type=HistoryLine)
path, *arguments = Path(sys.argv[1]), *sys.argv[2:]
"""


def _spawn(code, *arguments):
    """A process that is past its imports, and waits for a line."""
    command = [sys.executable, "-c", _PRELUDE + code, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    return process


def _ends(*processes):
    """How those that wait end, once all have got their line."""
    for process in processes:
        process.stdin.write(msgspec.json.encode(LINE) + b"\n")
        process.stdin.flush()
    for process in processes:
        process.communicate(timeout=600)
    return [process.returncode for process in processes]


def _sessions(path):
    return [json.loads(line)["session"] for line in path.read_text().splitlines()]


def _named(name):
    return msgspec.structs.replace(LINE, session=name)


def _refuse(sentence):
    raise AssertionError(sentence)


TIME = MetricVerdict(
    metric="step_seconds", status="regressed", value=2.0, baseline=1.0, limit=1.03, sensitivity=0.05, runs=2
)
MEMORY = MetricVerdict(metric="peak_allocated_bytes", status="pass", value=4e10, baseline=4e10, limit=4.08e10)
QUICK = measurement(step_seconds=(1.0, 1.1, 1.3), environment=gpu_environment(topology=(("X", "NV18"), ("NV18", "X"))))
SLOW = measurement(step_seconds=(2.0, 1.9, 2.1), peak_allocated_bytes=41_000_000_000, flops_per_step=10**15)
KNOBS = Case.__struct_fields__
RESULTS = {
    "measured": result(
        replies=(QUICK, SLOW), verdict=Verdict(status="regressed", sentence="is slower", metrics=(TIME, MEMORY))
    ),
    **{
        type(reply).__name__: result(replies=(reply,), summary=None, verdict=None)
        for reply in (out_of_memory(), crashed(), timed_out())
    },
    "emulated": result(reply=emulated_run(), device="emulated/h100", verdict=None),
    "no emulated run": result(reply=crashed(), device="emulated/h100", key="other"),
}


def test_a_line_has_the_case_the_environment_and_the_figures(snapshot):
    """One median of the steps' distances from their own process's median: of 0, 0, 0.1, 0.1, 0.1 and 0.2."""
    lines = {what: msgspec.structs.asdict(*lines_of([of], SESSION)) for what, of in RESULTS.items()}
    assert {(line["model"], line["sequence_length"]) for line in lines.values()} == {("llama-3.1-8b", 8192)}
    assert {line.pop("version_gputrain") for line in lines.values()} == {metadata.version("pytest-gputrain")}
    measured = lines.pop("measured")
    told = {"measured": {name: it for name, it in measured.items() if it is not None and name not in KNOBS}}
    for what, line in lines.items():
        differing = {name: value for name, value in line.items() if value != measured[name]}
        told[what] = {name: value for name, value in differing.items() if value is not None}
        told[what]["without"] = ", ".join(name for name, value in differing.items() if value is None)
    assert told == snapshot


def test_a_case_of_several_tests_has_one_line_of_the_last_that_judged_it_and_a_search_none():
    measured, judged, later = (result(nodeid=name) for name in "abc")
    measured = msgspec.structs.replace(measured, verdict=None)
    later = msgspec.structs.replace(later, verdict=Verdict(status="regressed", sentence="x"))
    for results in ([measured, judged, later], [judged, later, measured]):
        assert [line.verdict for line in lines_of(results, SESSION)] == ["regressed"]
    assert [line.verdict for line in lines_of([measured, measured], SESSION)] == [None]
    assert lines_of([result(search=Search(tries=(), most=4))], SESSION) == []


def test_counts_are_the_mean_of_the_timed_steps_and_null_where_nothing_was_counted():
    kinds = (StepCounts(waits=1, launches=8, library_calls=2), StepCounts(h2d_bytes=4096, slow_flops={"fp32": 64}))
    counts = Counts(steps=(0, 1, 1, 1), kinds=kinds)
    (line,) = lines_of([result(reply=emulated_run(counts=counts), device="emulated/h100", verdict=None)], SESSION)
    asked = {key: value for key in COUNT_KEYS if (value := getattr(line, key))}
    parts = {"work_per_step": 2.5, "launches_per_step": 2.0, "library_calls_per_step": 0.5}
    assert asked == {"waits_per_step": 0.25, **parts, "h2d_bytes_per_step": 3072.0, "fp32_flops_per_step": 48.0}
    (line,) = lines_of([result()], SESSION)
    assert {getattr(line, key) for key in COUNT_KEYS} == {None}


def test_every_key_is_one_column_of_one_type():
    """No lists or objects, and no whole number where another line has a fraction."""
    kinds = {
        name: {type(kind) for kind in (info.types if isinstance(info, msgspec.inspect.UnionType) else [info])}
        - {msgspec.inspect.NoneType}
        for field in msgspec.inspect.type_info(HistoryLine).fields
        for name, info in [(field.name, field.type)]
    }
    of = msgspec.inspect
    single = ({of.StrType}, {of.IntType}, {of.FloatType}, {of.BoolType}, {of.LiteralType})
    assert {name: column_type for name, column_type in kinds.items() if column_type not in single} == {}


@pytest.mark.parametrize("share", [True, False, 0.5])
def test_lines_are_of_the_types_they_declare(share):
    (line,) = lines_of([result(CASE.replace(activation_checkpointing=share, learning_rate=1))], SESSION)
    text = msgspec.json.encode(line)
    assert msgspec.json.decode(text, type=HistoryLine) == line
    assert {type(value) for value in json.loads(text).values()} <= {str, int, float, bool, type(None)}
    assert f'"activation_checkpointing":{float(share)}'.encode() in text
    assert b'"learning_rate":1.0' in text


_WRITER = """
for number in range(20):
    append(path, [msgspec.structs.replace(line, session=f"{arguments[0]}-{number}", sentence="x" * 5000)] * 3)
"""


def test_several_processes_append_at_once_and_every_line_is_whole(tmp_path):
    path = tmp_path / "history.jsonl"
    assert _ends(*[_spawn(_WRITER, str(path), name) for name in "abcd"]) == [0] * 4
    sessions = _sessions(path)
    assert sorted(sessions) == sorted(f"{name}-{number}" for name in "abcd" for number in range(20) for _ in range(3))
    runs = [sessions[at : at + 3] for at in range(0, len(sessions), 3)]
    assert all(len(set(run)) == 1 for run in runs), "the lines of a pytest run stand together"


_CRASHES = """
whole = os.write

def write(descriptor, data):
    if len(data) < 1000:  # of the lock
        return whole(descriptor, data)
    whole(descriptor, data[: len(data) - int(arguments[0])])
    os.kill(os.getpid(), 9)

os.write = write
append(path, [msgspec.structs.replace(line, session=name) for name in ("killed-1", "killed-2")])
"""


@pytest.mark.parametrize(("missing", "kept"), [(200, ["killed-1"]), (1, ["killed-1", "killed-2"])])
def test_after_a_kill_in_mid_write_the_next_line_stands_by_itself(tmp_path, missing, kept):
    path = tmp_path / "history.jsonl"
    append(path, [_named("before")])
    assert _ends(_spawn(_CRASHES, str(path), str(missing))) == [-9]
    said = append(path, [_named("after")])
    assert _sessions(path) == ["before", *kept, "after"]
    assert bool(said) == (missing > 1)
    if said:
        assert said.startswith(f"the last line of {path} was cut off by a crash (")


def test_wherever_a_line_is_cut_off_the_others_are_read_and_the_next_is_whole(tmp_path):
    path = tmp_path / "history.jsonl"
    append(path, [_named("one"), _named("two")])
    whole = path.read_bytes()
    begin = whole.index(b"\n") + 1
    for cut in (*range(begin + 1, len(whole) - 1, 97), len(whole) - 2):
        path.write_bytes(whole[:cut])
        warnings = []
        assert [line.session for _, line in read(path, HistoryLine, warnings.append)] == ["one"]
        assert len(warnings) == 1
        assert warnings[0].startswith(f"{path}:2 was cut off by a crash and is left out")
        append(path, [_named("three")])
        assert _sessions(path) == ["one", "three"]


def test_a_torn_line_that_is_the_first_or_longer_than_what_is_read_at_once_is_removed(tmp_path, monkeypatch):
    path = tmp_path / "history.jsonl"
    path.write_bytes(b'{"format": 2, "kind')
    assert "(19 bytes)" in append(path, [_named("one")])
    with path.open("ab") as file:
        file.write(b'{"' + b"x" * 5000)
    monkeypatch.setattr(history, "_LONGEST_LINE", 64)
    append(path, [_named("two")])
    assert _sessions(path) == ["one", "two"]


_FULL = """
size = path.stat().st_size + 100  # of the two lines, a hundred bytes can be written
resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
try:
    append(path, [line, line])
except OSError:
    sys.exit(3)
"""


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "history.jsonl"
    append(path, [_named("before")])
    before = path.read_bytes()
    assert _ends(_spawn(_FULL, str(path))) == [3]
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "corrupt",
    [b'{"format":2,"ki\n', b"\n", b"\x00\x00\x00\n", b'{"format":2}\n', b"[]\n", b'"\xff"\n'],
    ids=["torn", "empty", "zeros", "keys missing", "no object", "no text"],
)
def test_a_corrupt_line_before_the_end_is_refused_with_its_place(tmp_path, corrupt):
    path = tmp_path / "history.jsonl"
    append(path, [_named("one")])
    whole = path.read_bytes()
    path.write_bytes(whole + corrupt + whole)
    lines = read(path, HistoryLine, _refuse)
    assert next(lines)[0] == 0
    with pytest.raises(HistoryError, match=f"^{path}:2 is not a line of a history: .*; remove the line, or restore"):
        next(lines)


@pytest.mark.parametrize(
    "other",
    [b"# Notes\n", b"# Notes", b'{"a": 1}\n# Notes', b"[]", b"null", b"\xef\xbb\xbf{}", b"\0\0", b'{\n "results": []\n}\n'],
)
def test_a_file_that_is_no_history_is_left_as_it_is(tmp_path, other):
    path = tmp_path / "notes.md"
    path.write_bytes(other)
    with pytest.raises(HistoryError, match=r"notes\.md is no history, or its last line is none of one"):
        append(path, [LINE])
    assert path.read_bytes() == other


def test_what_is_not_a_regular_file_gets_no_line_and_a_hole_without_end_is_not_read(tmp_path):
    path = tmp_path / "history.jsonl"
    append(path, [LINE])
    with path.open("ab") as file:
        file.truncate(1 << 32)
    with pytest.raises(HistoryError, match="is no history"):
        append(path, [LINE])
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="it is not a regular file"):
        append(path, [_named("x" * 70_000)])  # more than a pipe holds
    path.unlink()
    path.symlink_to(path)
    for use in (lambda: append(path, [LINE]), lambda: History([path], (), Filter(), _refuse)):
        with pytest.raises((OSError, HistoryError), match=r"symbolic links|is not a file"):
            use()


def test_zeros_that_a_file_system_left_behind_the_last_line_are_removed(tmp_path):
    path = tmp_path / "history.jsonl"
    append(path, [_named("one")])
    with path.open("ab") as file:
        file.truncate(path.stat().st_size + 5000)
    assert "(5,000 bytes)" in append(path, [_named("two")])
    assert _sessions(path) == ["one", "two"]


def test_a_file_without_line_ends_is_refused_early(tmp_path, monkeypatch):
    path = tmp_path / "model.bin"
    path.write_bytes(b"{" * 200)
    monkeypatch.setattr(history, "_LONGEST_LINE", 64)
    with pytest.raises(HistoryError, match=r"model\.bin:1 is not a line of a history"):
        list(read(path, HistoryLine, _refuse))


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """On branch ``trunk``, without variables of this machine's CI."""
    for name in list(os.environ):
        if name.startswith(("GITHUB_", "CI_", "GIT_", "BUILDKITE_", "BRANCH_NAME")):
            monkeypatch.delenv(name)
    named = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    for arguments in (["init", "-q", "-b", "trunk"], [*named, "commit", "--allow-empty", "-qm", "x"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    return tmp_path


@pytest.mark.parametrize(
    ("variables", "branch"),
    [
        ({}, ""),
        ({"GITHUB_REF_NAME": "main", "GITHUB_REF_TYPE": "branch"}, "main"),
        ({"GITHUB_HEAD_REF": "feature", "GITHUB_REF_NAME": "12/merge"}, "feature"),
        ({"GITHUB_HEAD_REF": "", "GITHUB_REF_NAME": "v1.0", "GITHUB_REF_TYPE": "tag"}, ""),
        ({"CI_COMMIT_BRANCH": "main"}, "main"),
    ],
)
def test_a_detached_head_has_the_branch_that_ci_names(repository, monkeypatch, variables, branch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert RunInfo.begin(repository).branch == "trunk"
    subprocess.run(["git", "-C", str(repository), "checkout", "-q", "--detach"], check=True)
    assert RunInfo.begin(repository).branch == branch


def test_outside_of_a_repository_ci_names_no_branch(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_REF_NAME", "main")
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert RunInfo.begin(tmp_path).branch == ""


ONE_LINERS = re.findall(r"^((pandas|polars|duckdb)\..*)$", (DOCS / "trends.md").read_text(), re.MULTILINE)
assert [library for _, library in ONE_LINERS] == ["pandas", "polars", "duckdb"]


@pytest.mark.slow
@pytest.mark.parametrize(("code", "library"), ONE_LINERS, ids=[library for _, library in ONE_LINERS])
def test_a_one_liner_makes_a_column_of_every_key(tmp_path, monkeypatch, code, library):
    """A key that is null in the first thousands of lines is the hard part: a reader guesses types from some."""
    pytest.importorskip(library)
    emulated = result(reply=emulated_run(), device="emulated/h100", verdict=None)
    (early,) = lines_of([emulated], SESSION)
    append(tmp_path / "history.jsonl", [early] * 3000 + [LINE])
    monkeypatch.chdir(tmp_path)
    table = eval(code, {library: importlib.import_module(library)})
    # polars has an order of its own.
    assert sorted(table.columns) == sorted(HistoryLine.__struct_fields__)
    name = "median_step_seconds"
    total = table.sum(name).fetchall()[0][0] if library == "duckdb" else table[name].sum()
    assert total == LINE.median_step_seconds
