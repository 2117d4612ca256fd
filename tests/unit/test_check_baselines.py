"""Tests ``gputrain check-baselines``: what it finds, on which line, and what it lets pass."""

import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit_examples import CASE, baseline, baseline_run, cpu_environment, emulated_run, recorded

from pytest_gputrain.cli.check_baselines import check
from pytest_gputrain.cli.main import main
from pytest_gputrain.gate.baseline_changes import loosened
from pytest_gputrain.records import FORMAT, Case, Counts, StepCounts
from pytest_gputrain.storage.baselines import BaselineStore
from pytest_gputrain.storage.emulated import EmulationStore

COMMITTED = Path(__file__).parents[2] / "baselines"
OTHER = CASE.replace(model="gemma-7b")


def entry(case):
    run = baseline_run(environment=cpu_environment(), date="2026-01-31T12:00:00Z", flops_per_step=8 * 10**14)
    return baseline(run, run, case=Case(**case.identity()), device="cpu")


def record(folder, *cases):
    return BaselineStore(folder).update("cpu", "llm", {str(case): entry(case) for case in cases or (CASE, OTHER)})


def emulate(folder):
    return EmulationStore(folder).update("h100", "llm", {str(CASE): recorded(emulated_run())})


def problems(folder):
    """What the check says, without the folder."""
    return [str(problem).removeprefix(f"{folder}/") for problem in check(folder)]


def edit(path, change):
    """Change the document of a file, which is then written as an update writes it."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document, indent=1))


def line_of(path, text):
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)


def rewrite(path, old, new):
    path.write_text(path.read_text().replace(old, new, 1))


def test_the_committed_baselines_and_what_an_update_writes_are_sound(tmp_path, capsys):
    assert len(list(COMMITTED.rglob("*.json"))) > 10
    assert main(["check-baselines", str(COMMITTED)]) == 0
    assert capsys.readouterr().out == ""
    swept = CASE.replace(batch_size=4, learning_rate=1e-5, steps=20, named=("batch_size", "learning_rate", "steps"))
    record(tmp_path, CASE, OTHER, swept)
    emulate(tmp_path)
    assert problems(tmp_path) == []


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_line_stands_twice_is_found(data):
    with tempfile.TemporaryDirectory() as folder:
        write = data.draw(st.sampled_from([record, emulate]))
        path = write(Path(folder))
        lines = path.read_text().splitlines(keepends=True)
        at = data.draw(st.integers(0, len(lines) - 1))
        path.write_text("".join([*lines[:at], lines[at], *lines[at:]]))
        assert [problem.path for problem in check(Path(folder))][:1] == [path]


def test_every_merge_marker_and_every_case_that_stands_twice_is_told_by_its_line(tmp_path):
    path = record(tmp_path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], "<<<<<<< HEAD", lines[4], "=======", lines[4], ">>>>>>> branch", *lines[5:]]))
    marker = "a merge-conflict marker; take one side, or record again"
    assert problems(tmp_path) == [f"cpu/llm.json:{line}: {marker}" for line in (5, 7, 9)]
    path.write_text("\n".join(lines))
    begin, end = (line_of(path, f'"{case}": {{') - 1 for case in (OTHER, CASE))
    path.write_text("\n".join([*lines[:end], *lines[begin:end], *lines[end:]]))
    assert problems(tmp_path) == [f"cpu/llm.json:{end + 1}: {OTHER} occurs here a second time; delete one of them"]


def of_case(**fields):
    return lambda file: file["cases"][str(CASE)].update(**fields)


WRONG = {
    "of another format": (lambda file: file.update(format=FORMAT + 1), "{"),
    "of another suite": (lambda file: file.update(suite="other"), "{"),
    "without runs": (of_case(runs=[]), f'"{CASE}": {{'),
    "of another scale": (of_case(scale="tiny"), f'"{CASE}": {{'),
    "without its case": (lambda file: file["cases"][str(CASE)].pop("case"), f'"{CASE}": {{'),
    "no environments": (lambda file: file["environments"].clear(), f'"{CASE}": {{'),
    "a bad environment": (lambda file: next(iter(file["environments"].values())).update(packages=5), "device_name"),
}
"""What is done to a file, and what stands in the line that is told, or, for an environment, in the one after it."""

TEXTS = {
    "in another form": ("[1.0, 1.0, 1.0]", "[1.0,1.0,1.0]", '"step_seconds"'),
    "no number in a figure": ("[1.0, 1.0, 1.0]", "NaN", '"step_seconds"'),
    "no number for the suite": ('"llm"', "NaN", '"suite"'),
    "an environment of another name": ("node-1", "node-2", "device_name"),
    "a name that its case does not have": (f'"{CASE}"', f'"{CASE}-new"', f'"{CASE}-new"'),
}


def test_what_is_wrong_is_told_by_its_line(tmp_path, snapshot):
    said = {}

    def tell(what, path, place):
        (sentence,) = problems(tmp_path)
        assert str(tmp_path) not in sentence
        line = line_of(path, place) - (place == "device_name")
        name = path.relative_to(tmp_path)
        assert sentence.startswith(f"{name}:{line}: "), (what, sentence)
        said[what] = sentence.removeprefix(f"{name}:{line}: ")
        path.unlink()

    for what, (change, place) in WRONG.items():
        edit(record(tmp_path, CASE), change)
        tell(what, tmp_path / "cpu" / "llm.json", place)
    for what, (old, new, place) in TEXTS.items():
        path = record(tmp_path, CASE)
        rewrite(path, old, new)
        tell(what, path, place)
    for suffix in ("-batch_size=3", "-colour=red", "é"):
        path = BaselineStore(tmp_path).update("cpu", "llm", {f"{CASE}{suffix}": entry(CASE)})
        tell(f"the name with {suffix}", path, f'"{CASE}{suffix}"')
    path = BaselineStore(tmp_path).update("cpu", "llm", {"a\nb": entry(CASE)})
    edit(path, lambda file: file["cases"]["a\nb"].update(runs=[]))
    tell("a name of two lines", path, '"a\\nb"')
    path = emulate(tmp_path)
    rewrite(path, '"refused": ""', '"refused": 1')
    tell("an emulated run", path, str(CASE))
    path = record(tmp_path)
    path.write_text("\n".join([*path.read_text().splitlines()[:9], '"cut off": tru']))
    tell("cut off", path, '"cut off"')
    assert said == snapshot


def test_published_tables_are_checked_too(tmp_path):
    folder = tmp_path / "published"
    shutil.copytree(COMMITTED / "published", folder)
    shutil.copy(folder / "paddlemix.json", folder / "again.json")
    edit(folder / "again.json", lambda table: table.update(name="again"))
    (both,) = problems(tmp_path)
    line = line_of(folder / "paddlemix.json", '"h800": {')
    assert both.startswith(
        f"published/paddlemix.json:{line}: has llava-1.6-7b-pretrain-bf16-zero2 on h800, which again has "
    )
    edit(folder / "again.json", lambda table: table.update(name="other"))
    assert problems(tmp_path) == ["published/again.json:1: says that it is other; restore it from git"]
    edit(folder / "again.json", lambda table: table.update(name="again"))
    edit(folder / "again.json", lambda table: table["rows"][0]["cells"].popitem())
    line = line_of(folder / "again.json", '"h800": {')
    assert (
        f"published/again.json:{line}: has llava-1.6-7b-pretrain-bf16-zero2 on h800 in other columns"
        in problems(tmp_path)[0]
    )


@pytest.mark.parametrize("place", [".", "cpu/old", "emulated", "published/2024"])
def test_files_where_no_run_looks_are_told(tmp_path, place):
    path = record(tmp_path)
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    path.rename(tmp_path / place / "llm.json")
    (sentence,) = problems(tmp_path)
    assert ":1: no run looks for a baseline here, but in " in sentence


def test_a_folder_in_the_place_of_a_file_is_told(tmp_path):
    (tmp_path / "cpu" / "llm.json").mkdir(parents=True)
    (sentence,) = problems(tmp_path)
    assert sentence.endswith("llm.json:1: it cannot be read: Is a directory")


def test_runs_of_one_session_on_a_gpu_are_warned_of_and_pass(tmp_path, capsys):
    folder = "nvidia-h100-80gb-hbm3"
    gpu = baseline(*[baseline_run()] * 5, case=Case(**CASE.identity()))
    path = BaselineStore(tmp_path).update(folder, "llm", {str(CASE): gpu})
    assert main(["check-baselines", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        f"{path}:1: warning: all runs of 1 case come from one session each, so they do not show how much days differ\n"
    )
    several = baseline(*(baseline_run(session=session) for session in "ab"), case=Case(**CASE.identity()))
    BaselineStore(tmp_path).update(folder, "llm", {str(CASE): several})
    assert problems(tmp_path) == []


def git(folder, *arguments):
    identity = ("-c", "user.name=me", "-c", "user.email=me@example.invalid")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository whose folder of baselines is committed; the folder."""
    monkeypatch.delenv("CI", raising=False)
    folder = tmp_path / "baselines"
    record(folder)
    emulate(folder)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    return folder


def listed(folder, capsys, *arguments):
    """Exit status and lines of the list, without those of other problems."""
    status = main(["check-baselines", str(folder), "--since", "HEAD", *arguments])
    lines = capsys.readouterr().out.splitlines()
    return status, lines[next((at for at, line in enumerate(lines) if "since HEAD" in line), 0) :]


def of_runs(change):
    return lambda document: [change(run) for run in document["cases"][str(CASE)]["runs"]]


def raise_peak(run):
    run["peak_allocated_bytes"] = run["peak_allocated_bytes"] * 105 // 100


def raise_by_one(run):
    run["peak_allocated_bytes"] += 1
    run["flops_per_step"] += 1


def run_out(run):
    kept = {name: run[name] for name in ("environment", "date", "session", "commit") if name in run}
    run.clear()
    run |= {"outcome": "out_of_memory", "out_of": "device", **kept}


LOOSER = {
    "FLOPs are lost": (of_runs(lambda run: run.pop("flops_per_step")), 1),
    "a peak is raised": (of_runs(raise_peak), 0),
    "a byte and an operation more": (of_runs(raise_by_one), 0),
    "a run is lost": (lambda document: document["cases"][str(CASE)]["runs"].pop(), 1),
    "it runs out of memory": (of_runs(run_out), 1),
    "removed": (lambda document: document["cases"].pop(str(CASE)), 1),
}


def test_what_lets_more_pass_than_before_is_listed(repository, capsys, snapshot):
    file, said = repository / "cpu" / "llm.json", {}
    sound = file.read_bytes()
    for what, (change, lost) in LOOSER.items():
        edit(file, change)
        BaselineStore(repository).update("cpu", "llm", {})  # in the form of an update, so that only the change is wrong
        status, lines = listed(repository, capsys)
        assert (status, listed(repository, capsys, "--strict")[0]) == (0, lost)
        said[what] = " / ".join(lines)
        file.write_bytes(sound)
    assert said == snapshot


def test_in_ci_what_is_not_compared_any_more_fails(repository, capsys, monkeypatch):
    (repository / "emulated" / "h100" / "llm.json").unlink()
    monkeypatch.setenv("CI", "true")
    title = "## since HEAD: 1 baseline removed or changed in kind, 0 raised"
    listing = [title, "", f"- emulated/h100/llm.json {CASE}: removed"]
    assert listed(repository, capsys, "--format=markdown") == (1, listing)
    assert listed(repository, capsys, "--no-strict")[0] == 0


def test_the_same_baselines_and_more_of_them_let_no_more_pass(repository, capsys):
    assert listed(repository, capsys, "--strict") == (0, ["since HEAD: no baseline lets more pass"])
    record(repository, CASE.replace(model="gemma-2b"))
    assert listed(repository, capsys, "--strict") == (0, ["since HEAD: no baseline lets more pass"])
    other = repository.parent / "a folder that the commit has not"
    record(other)
    assert listed(other, capsys, "--strict") == (0, ["since HEAD: no baseline lets more pass"])


@pytest.mark.parametrize("reference", ["nowhere", "--output=made", "HEAD:baselines"])
def test_what_is_no_commit_is_told(repository, capsys, reference):
    assert main(["check-baselines", str(repository), f"--since={reference}"]) == 2
    assert f"{reference!r} is not a commit of the repository of" in capsys.readouterr().err
    assert not (repository / "made").exists()


def test_a_suite_whose_test_file_is_gone_is_named(repository, capsys):
    assert main(["check-baselines", str(repository)]) == 0, "no test of any suite is here: they may be elsewhere"
    BaselineStore(repository).update("cpu", "vision", {str(CASE): entry(CASE)})
    (repository.parent / "tests").mkdir()
    (repository.parent / "tests" / "test_llm.py").touch()
    capsys.readouterr()
    assert main(["check-baselines", str(repository)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{repository}/cpu/vision.json:1: no test asks for these any more: there is no test_vision.py; delete the file, or "
        "restore the test"
    ]


def test_every_emulated_run_is_compared_under_its_own_conditions():
    """A run looks for that of its own versions, which need not be the last."""
    later = emulated_run(packages={"torch": "99"})
    before = recorded(emulated_run(), later)
    raised = emulated_run(peak_allocated_bytes=64 << 30, peak_reserved_bytes=64 << 30)
    what = loosened(before, recorded(raised, later))
    assert (len(what.raised), what.lost) == (2, ())
    assert what.raised[0].startswith("peak memory ")
    assert what.raised[0].endswith("(+100.0 %)")
    assert loosened(before, recorded(emulated_run(fits=False), later)).lost == ("emulated to fit -> emulated not to fit",)
    assert loosened(before, before) == ((), ())


def test_a_baseline_that_lets_a_step_ask_the_gpu_for_more_is_told():
    def emulated(*kinds):
        counts = Counts(steps=tuple(range(len(kinds))), kinds=tuple(StepCounts(**kind) for kind in kinds))
        return recorded(emulated_run(counts=counts if kinds else None))

    before = emulated({"launches": 9, "d2d": 2}, {"launches": 9, "d2d": 2})
    assert loosened(before, emulated({"launches": 9, "waits": 1}, {"launches": 9})).raised == ("waits 0 -> 1 in 2 steps",)
    assert loosened(before, emulated({"launches": 9, "d2d": 2})).lost == ("counts of 2 steps -> 1",)
    assert loosened(before, emulated()).lost == ("without what its steps ask of the GPU",)
    assert loosened(emulated(), before) == ((), ())
