"""Tests what CI runs, and what is told of a part that cannot be installed, fails or takes too long."""

import configparser
import itertools
import json
import re
import tomllib
from pathlib import Path

import pytest
import pythons
from leftovers import has_ended, wait_until

import ci

ROOT = ci.ROOT
RAY = ci.Part("ray", 12)
SKIPS = "SKIPPED [2] tests/gpu/test_on_gpu.py:40: needs a GPU, found cpu\n"


def runs(*outcomes):
    due = list(outcomes)

    def run(command, minutes):
        return due.pop(0)

    return run


@pytest.fixture(autouse=True)
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(ci, "ROOT", tmp_path)
    return tmp_path


def outcome(part, *outcomes, minutes_left=60):
    run = runs(*outcomes)
    return ci.outcome(part, "tox", run, minutes_left, lambda: ci.prepare(part, "tox", run, minutes_left))


def ran(*lines, status=0):
    return ci.Ran(status, lines)


def test_every_environment_is_a_part():
    tox = configparser.ConfigParser()
    tox.read(ROOT / "tox.ini")
    quick = {name.strip() for name in tox["tox"]["env_list"].split(",")}
    sections = [name.removeprefix("testenv:") for name in tox.sections() if name.startswith("testenv:")]
    environments = set(itertools.chain.from_iterable(map(_expanded, sections)))
    pictures = {"pictures", "pictures-emulated"}
    assert environments - quick - pictures == {part.name for part in ci.PARTS} - {ci.QUICK}, "pictures check nothing"
    assert ci.PARTS[0].name == ci.QUICK


def _expanded(section):
    """The names that tox makes of a section with a choice in braces."""
    before, *rest = re.split(r"[{}]", section)
    return [f"{before}{each}{rest[1]}" for each in rest[0].split(",")] if rest else [section]


@pytest.mark.parametrize(
    ("outcomes", "status", "skipped"),
    [
        ([ran(), ran(SKIPS, SKIPS)], "passed", ("4 of tests/gpu/test_on_gpu.py: needs a GPU, found cpu",)),
        ([ran(), ran("1 failed\n", status=1)], "failed", ()),
        ([ran(), ran(status=None)], "failed, as its time was over", ()),
        (
            [ran("ERROR: No matching distribution found for ray>=2.40\n", "ray: exit 1\n", status=1)],
            "skipped",
            ("all of it: cannot be installed: ERROR: No matching distribution found for ray>=2.40",),
        ),
        ([ran(status=None)], "skipped", ("all of it: cannot be installed: its installation took too long",)),
    ],
)
def test_what_became_of_a_part_is_told(outcomes, status, skipped):
    came = outcome(RAY, *outcomes)
    assert (came.status, came.skipped) == (status, skipped)


def test_a_part_that_too_little_time_is_left_for_is_left_out_and_the_readme_s_command_must_be_installed():
    came = outcome(RAY, minutes_left=3)
    assert came.status == ci.INCOMPLETE
    assert came.skipped == ("all of it: 3 of 70 minutes are left, too few",)
    assert outcome(ci.PARTS[0], ran("ERROR: no network\n", status=1), minutes_left=90).status == "failed"


@pytest.mark.parametrize(
    ("minutes_left", "line", "status", "skipped"),
    [
        (RAY.minutes - 1, "E", "failed, as its time was over", ()),
        (RAY.minutes - 1, "tests/plugin/test_fleet.py ..F.s [ 20%]\n", "failed, as its time was over", ()),
        (RAY.minutes - 1, ".F......", "failed, as its time was over", ()),
        (RAY.minutes - 1, "E   File\n", ci.INCOMPLETE, ("the rest of it: the 70 minutes of the whole run were over",)),
        (RAY.minutes - 1, "..s.x   [ 20%]\n", ci.INCOMPLETE, ("the rest of it: the 70 minutes of the whole run were over",)),
        (RAY.minutes + 1, "", "failed, as its time was over", ()),
    ],
)
def test_a_slow_machine_fails_no_part_that_did_not_have_its_own_time(minutes_left, line, status, skipped):
    came = outcome(RAY, ran(), ran(line, status=None), minutes_left=minutes_left)
    assert (came.status, came.skipped) == (status, skipped)


BARE, FOREIGN = (next(part for part in ci.PARTS if part.name == name) for name in ("bare-py314", "foreign"))


@pytest.mark.parametrize("part", [BARE, FOREIGN])
def test_a_part_is_installed_and_tested_with_its_own_python(part, monkeypatch):
    monkeypatch.setattr(pythons, "find", lambda version, python: Path(f"/of/{version}"))
    commands = []
    run = lambda command, minutes: commands.append(command) or ran()  # noqa: E731
    monkeypatch.setattr(ci, "missing_programs", lambda part, run, minutes: ())
    came = ci.outcome(part, "tox", run, 60, lambda: ci.prepare(part, "tox", run, 60))
    assert came.status == "passed"
    assert [command[-2:] for command in commands] == 2 * [("--discover", f"/of/{part.python}")]


def test_a_python_that_is_not_found_is_named(monkeypatch):
    def find(version, python):
        raise pythons.NotFound("there is no apt-get")

    monkeypatch.setattr(pythons, "find", find)
    came = outcome(BARE)
    assert (came.name, came.status) == ("bare-py314", "skipped")
    assert came.skipped == ("all of it: cannot be installed: there is no apt-get",)
    came = outcome(FOREIGN._replace(programs={}), ran(), ran())
    assert came.status == "passed"
    assert came.skipped == ("Python 3.13, for which this machine's own was taken: there is no apt-get",)


def test_every_python_that_is_claimed_runs():
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    claimed = [found[1] for each in classifiers if (found := re.search(r":: (3\.\d+)$", each))]
    assert claimed == [ci.OWN_PYTHON, *(part.python for part in ci.PARTS if part.name.startswith("bare-"))]


def test_an_environment_is_removed_and_its_name_is_free_at_once(root):
    environment = root / ".tox" / "ray"
    (environment / "lib").mkdir(parents=True)
    assert outcome(RAY, ran(), ran()).status == "passed"
    assert not environment.exists()
    wait_until(lambda: not any(environment.parent.iterdir()))


@pytest.mark.slow
def test_a_command_ends_with_its_processes_when_its_time_is_over(capfd):
    came = ci.run(["sh", "-c", "sleep 600 & echo $!; wait"], minutes=2 / 60)
    assert came.status is None
    (pid,) = (int(line) for line in came.lines)
    wait_until(lambda: has_ended(pid))


def test_the_last_lines_name_every_part_and_every_skip(capsys):
    outcomes = [ci.Outcome("slow", "passed", 12.34, ("what needs munge: no",)), ci.Outcome("ray", "failed", 1.0, ())]
    assert ci.told(outcomes).splitlines()[-4:] == [
        "what CI ran:",
        "  slow: passed after 12.3 minutes",
        "    skipped: what needs munge: no",
        "  ray: failed after 1.0 minutes",
    ]
    with pytest.raises(SystemExit):
        ci.main(["fast"])
    assert "there is no part fast; the parts are quick," in capsys.readouterr().err


def test_a_part_that_leaves_a_core_runs_beside_the_next():
    names = [tuple(part.name for part in group) for group in ci.grouped(ci.PARTS)]
    assert ("bare", "bare-py312", "bare-py313", "bare-py314", "package") in names
    assert [name for group in names for name in group] == [part.name for part in ci.PARTS]
    assert list(ci.grouped([RAY._replace(leaves_a_core=True)])) == [(RAY._replace(leaves_a_core=True),)]


def test_a_run_that_left_out_a_part_says_so_last_and_is_red_on_github():
    complete, cut = ci.Outcome("bare", "passed", 1.0, ()), ci.Outcome("ray", ci.INCOMPLETE, 0.0, ("all of it: no time",))
    assert ci.told([complete, cut]).splitlines()[-1] == "incomplete: 70 minutes were too few for ray"
    assert "incomplete" not in ci.told([complete])
    on_github = {"GITHUB_ACTIONS": "true"}
    assert [ci.exit_status(of, on_github) for of in ([complete], [complete, cut])] == [0, 1]
    assert ci.exit_status([complete, cut], {}) == 0
    assert ci.exit_status([complete._replace(status="failed, as its time was over")], {}) == 1


def test_github_gets_the_parts_as_a_matrix(capsys):
    assert (ci.main(["--list"]), ci.main(["--list", "--weekly"])) == (0, 0)
    each_time, weekly = map(json.loads, capsys.readouterr().out.splitlines())
    assert [job["part"] for job in (*each_time, *weekly)] == [part.name for part in ci.PARTS]
    assert {"part": "foreign", "python": "3.13", "minutes": 34} in each_time
    assert {"part": "newest", "python": "3.11", "minutes": 48} in weekly


def test_the_oldest_versions_are_those_that_are_allowed():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, frameworks = pyproject["project"], pyproject["dependency-groups"]["frameworks"]
    extras = project["optional-dependencies"]
    floors = dict(each.split(">=") for each in [*project["dependencies"], *extras["suite"], *extras["report"], *frameworks])
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    for name, floor in floors.items():
        assert f"{pinned[name]}.".startswith(f"{floor}."), name
