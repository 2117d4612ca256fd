"""Tests ``gputrain trend``: the changes in a history, the commits around them, and what changed with them."""

import json
import math
import random
import re
import subprocess
import sys

import msgspec
import pytest
from unit_examples import CASE, result

from pytest_gputrain.cli.main import main
from pytest_gputrain.records import Trends
from pytest_gputrain.report.history_lines import lines_of
from pytest_gputrain.report.trend.reading import Filter, History
from pytest_gputrain.storage.history import append
from pytest_gputrain.utils.git import RunInfo

LINE = lines_of([result()], RunInfo(id="s", created="2026-01-01T00:00:00Z", commit="c", branch="main"))[0]


def line(number, **fields):
    """Of the run of that number: one an hour, each of a commit of its own."""
    date = f"2026-{1 + number // 672:02}-{1 + number // 24 % 28:02}T{number % 24:02}:00:00Z"
    return msgspec.structs.replace(LINE, date=date, commit=f"c{number:04}", session=f"s{number}", **fields)


def slower(runs, at, by=1.05, **fields):
    """A case that is slower from a run on, with noise of 1 %."""
    draw = random.Random(1)
    return [
        line(number, median_step_seconds=(by if number >= at else 1.0) * math.exp(draw.gauss(0, 0.01)), **fields)
        for number in range(runs)
    ]


@pytest.fixture
def trend(tmp_path, capsys):
    """The command, on histories of these lines."""

    def run(*histories, arguments=()):
        paths = [tmp_path / f"{number}.jsonl" for number in range(len(histories))]
        for path, lines in zip(paths, histories, strict=True):
            path.unlink(missing_ok=True)
            append(path, lines)
        code = main(["trend", *map(str, paths), *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def counted(*waits, **fields):
    """A case that waits so often in each step of a run."""
    return [line(number, kind="emulation", waits_per_step=float(often), **fields) for number, often in enumerate(waits)]


def test_any_change_of_a_count_is_one_at_its_commit_also_from_0(trend):
    code, out, _ = trend(counted(0, 0, 1, 1, 1, 0), arguments=["--metric=waits_per_step", "--format=markdown"])
    assert code == 1
    out = out.replace("\\", "")
    assert "| more | 0 -> 1 | c0001..c0002 |" in out
    assert "| -100.0 % less | 1 -> 0 | c0004..c0005 |" in out


def test_growth_that_the_gate_lets_pass_is_no_change_until_it_adds_up(trend):
    lines = [line(number, work_per_step=100.0 + 3 * number) for number in range(5)]
    (course,) = trends_of(trend, lines, arguments=["--metric=work_per_step"]).courses
    assert [(change.before, change.after, change.first.commit) for change in course.changes] == [
        (101.5, 107.5, "c0002"),
        (107.5, 112.0, "c0004"),
    ]


def test_counts_are_told_without_being_asked_for_where_they_have_changed(trend):
    lines = counted(1, 1, 2, launches_per_step=40.0, median_step_seconds=None)
    told = trends_of(trend, lines).courses
    assert [course.metric for course in told] == ["peak_allocated_bytes", "waits_per_step"]
    asked = trends_of(trend, lines, arguments=["--metric=launches_per_step"]).courses
    assert [(course.metric, course.level) for course in asked] == [("launches_per_step", 40.0)]


def test_branches_of_which_one_has_a_count_are_one_series(trend):
    older = [line(number, branch="one") for number in range(2)]
    newer = [line(number, branch="two", waits_per_step=float(number)) for number in range(2, 4)]
    for histories in ((older, newer), (newer, older)):
        (course,) = trends_of(trend, *histories, arguments=["--metric=waits_per_step", "--branch=*"]).courses
        assert [(change.before, change.after, change.first.commit) for change in course.changes] == [(2, 3, "c0003")]


def trends_of(trend, *histories, arguments=()):
    code, out, _ = trend(*histories, arguments=["--format=json", "--fail-on=never", *arguments])
    assert code == 0
    return msgspec.json.decode(out, type=Trends)


def test_a_change_is_told_with_its_commits_and_what_changed_with_it(trend):
    lines = slower(60, 40)
    lines[40:] = [
        msgspec.structs.replace(history_line, version_torch="2.14.0", version_peft="0.21", batch_size=4)
        for history_line in lines[40:]
    ]
    step, memory = trends_of(trend, lines).courses
    assert (step.key, step.suite, step.device) == (str(CASE), "llm", "nvidia-h100-80gb-hbm3")
    assert (step.metric, memory.metric) == ("median_step_seconds", "peak_allocated_bytes")
    assert (step.runs, step.noise) == (60, pytest.approx(0.01, rel=0.4))
    (change,) = step.changes
    assert change.share == pytest.approx(0.05, abs=0.01)
    assert change.worse
    assert (change.base.commit, change.first.commit) == ("c0039", "c0040")
    assert change.first.date == "2026-01-02T16:00:00Z"
    assert (change.runs, change.runs_since) == (20, 20)
    assert change.differences == ("torch 2.13.0 -> 2.14.0", "peft absent -> 0.21", "batch size 2 -> 4")
    assert (step.level, step.since.commit, step.last.commit) == (change.after, "c0040", "c0059")
    assert step.latest == lines[-1].median_step_seconds
    assert (memory.changes, memory.level, memory.since.commit) == ((), 40_000_000_000, "c0000")


def test_what_lines_of_earlier_versions_lack_is_no_difference(trend):
    facts = {"cores": 8, "host_memory_bytes": 2**38, "nics": "none", "version_cudnn": "9.10.2", "version_nccl": "2.27.3"}
    lines = slower(60, at=40)
    lines[40:] = [msgspec.structs.replace(history_line, **facts) for history_line in lines[40:]]
    (change,) = trends_of(trend, lines).courses[0].changes
    assert change.differences == ()
    before = facts | {"cores": 16, "host_memory_bytes": 2**37, "version_cudnn": "9.8.0"}
    lines[:40] = [msgspec.structs.replace(history_line, **before) for history_line in lines[:40]]
    (change,) = trends_of(trend, lines).courses[0].changes
    assert set(change.differences) == {"cores 16 -> 8", "host memory 128 GiB -> 256 GiB", "cudnn 9.8.0 -> 9.10.2"}


def test_changes_are_told_in_lines(trend, snapshot):
    same_commit = [msgspec.structs.replace(history_line, commit="c0ffee") for history_line in slower(60, 40)]
    told = {
        "terminal": trend(slower(60, 40)),
        "markdown": trend(slower(60, 40), arguments=["--format=markdown"]),
        "no change": trend(slower(60, 60)),
        "one commit measured again": trend(same_commit),
    }
    for metric in ("peak_allocated_bytes", "flops_per_step", "tokens_per_second"):
        steps = [line(number, **{metric: 2 if number < 20 else 3}) for number in range(40)]
        told[metric] = trend(steps, arguments=[f"--metric={metric}"])
    for what, (code, out, err) in told.items():
        text = re.sub("─+\n|  +|(?<=\n)\n", lambda rule: " " if " " in rule[0] else "", out)
        told[what] = f"{code} {err}\n{text}" if what != "markdown" else (code, err, out)
    assert told == snapshot


def test_series_are_of_one_case_on_one_device(trend):
    lines = [
        history_line
        for number in range(30)
        for history_line in (
            line(number, device="h100", median_step_seconds=1.0),
            line(number, device="a100", median_step_seconds=2.0),
            line(number, key="other", median_step_seconds=3.0),
            line(number, suite="other", median_step_seconds=4.0),
        )
    ]
    courses = trends_of(trend, lines, arguments=["--metric=median_step_seconds"]).courses
    found = sorted((course.level, course.runs, len(course.changes)) for course in courses)
    assert found == [(level, 30, 0) for level in (1.0, 2.0, 3.0, 4.0)]
    (chosen,) = trends_of(trend, lines, arguments=["--metric=median_step_seconds", "--case=oth"]).courses
    assert chosen.level == 3.0
    (chosen,) = trends_of(trend, lines, arguments=["--metric=median_step_seconds", "--device=a100"]).courses
    assert chosen.level == 2.0


def test_several_files_are_one_history_in_the_order_of_time_and_a_file_given_twice_is_one(trend, tmp_path):
    lines = slower(60, 40)
    lines[10] = line(10, median_step_seconds=None, outcome="crashed")
    step = trends_of(trend, lines[1::2], lines[::2]).courses[0]
    assert step.runs == 59, "a run without a figure is passed over"
    assert (step.changes[0].base.commit, step.changes[0].first.commit) == ("c0039", "c0040")
    assert step == trends_of(trend, lines).courses[0]
    paths = [tmp_path / name for name in ("a", "b", "link")]
    append(paths[0], lines[:3])
    append(paths[1], lines[3:5])
    paths[2].symlink_to(paths[0])
    history = History(paths, ("median_step_seconds",), Filter(), print)
    (series,) = history.series.values()
    found = [history.line(offset)["session"] for offset in series.offsets]
    assert found == ["s0", "s1", "s2", "s3", "s4"], "each line is found again in its file"


def test_only_the_trunk_counts_if_there_is_one_unless_another_branch_is_asked_for(trend):
    lines = [line(number, branch="main", median_step_seconds=1.0) for number in range(20)]
    lines += [line(number, branch="feature", median_step_seconds=2.0) for number in range(20, 30)]
    code, out, err = trend(lines, arguments=["--format=json"])
    assert code == 0
    assert err == "gputrain: of branch main only; 10 runs of others are left out (--branch='*' takes all)\n"
    assert [course["runs"] for course in json.loads(out)["courses"]] == [20, 20]
    assert trends_of(trend, lines, arguments=["--branch=feature"]).courses[0].level == 2.0
    both = trends_of(trend, lines, arguments=["--branch=*"]).courses[0]
    assert (both.runs, both.changes[0].first.commit) == (30, "c0020")
    absent = "gputrain: no line is of branch 'trunk'; there are feature, main\n"
    assert trend(lines, arguments=["--branch=trunk"]) == (2, "", absent)
    _, out, err = trend([line(number, branch=("", "dev")[number % 2]) for number in range(20)], arguments=["--format=json"])
    assert (json.loads(out)["courses"][0]["runs"], err) == (20, "")


@pytest.mark.parametrize(
    ("by", "arguments", "code"),
    [
        (1.1, [], 1),
        (1.1, ["--newest=20"], 1),
        (1.1, ["--newest=19"], 0),
        (1.1, ["--least=9%"], 1),
        (1.1, ["--least=20%"], 0),
        (1.1, ["--fail-on=improved"], 0),
        (1.1, ["--fail-on=never"], 0),
        (0.9, [], 0),
        (0.9, ["--fail-on=regressed,improved"], 1),
        (1.0, ["--fail-on=regressed,improved"], 0),
    ],
)
def test_a_change_for_the_worse_fails_unless_it_is_too_small_or_too_old_or_something_else_is_asked_for(
    trend, by, arguments, code
):
    assert trend(slower(60, 40, by), arguments=arguments)[0] == code


_OTHER = '{"format":2,"date":"2026-01-01T00:00:00Z","suite":"","key":"","device":"","branch":""}'


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the history holds no runs; --gpu-history appends them"),
        ("{}\n", "{path}:1 is not a line of a history: Object missing required field `format`; remove the line, or *"),
        (
            f"{_OTHER}\n{_OTHER.replace('2', '3', 1)}\n",
            "{path} has lines of format 3, this version reads format 2; update *",
        ),
        (
            f"{_OTHER}\n{_OTHER.replace('2', '1', 1)}\n",
            "{path} has lines of format 1, this version reads format 2",
        ),
        ('{"format":2,"date":"yesterday","suite":"","key":"","device":"","branch":""}\n', "{path}:1 *Invalid RFC3339*"),
        ('{"format":2,"date":"2026-01-01T00:00:00","suite":"","key":"","device":"","branch":""}\n', "{path}:1 *timezone*"),
    ],
    ids=["empty", "another object", "a later format", "an earlier format", "no date", "no time zone"],
)
def test_what_is_no_history_is_refused(tmp_path, capsys, text, sentence):
    path = tmp_path / "history.jsonl"
    path.write_text(text)
    assert main(["trend", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    pytest.LineMatcher([err.rstrip("\n")]).fnmatch_lines([f"gputrain: {sentence.replace('{path}', str(path))}"])


def test_a_file_or_a_case_that_is_none_is_told(trend, tmp_path, capsys):
    for name in ("gone.jsonl", "."):
        assert main(["trend", str(tmp_path / name)]) == 2
        assert " is not a file; give what --gpu-history wrote" in capsys.readouterr().err
    sentence = "gputrain: none of the 20 lines is of a case or device with 'lamma'\n"
    assert trend(slower(20, 20), arguments=["--case=lamma"]) == (2, "", sentence)


def test_a_long_history_takes_little_memory_a_line(tmp_path):
    """A date, a place and two figures are 32 bytes; the lines themselves have over a thousand."""
    path, count = tmp_path / "history.jsonl", 30_000
    text = msgspec.json.encode(line(0)) + b"\n"
    path.write_bytes(text * count)
    code = (
        "import sys, tracemalloc; from pathlib import Path\n"
        "from pytest_gputrain.report.trend.reading import Filter, History\n"
        "tracemalloc.start()\n"
        f"history = History([Path({str(path)!r})], ('median_step_seconds', 'peak_allocated_bytes'), Filter(), print)\n"
        "print(tracemalloc.get_traced_memory()[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 40 * count + 300_000
