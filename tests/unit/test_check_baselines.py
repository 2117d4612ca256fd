"""Tests ``gputrain check-baselines``: what it finds, on which line, and what it lets pass."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit_examples import CASE, baseline, baseline_run, cpu_environment, prediction, recorded

from pytest_gputrain.cli.check_baselines import check
from pytest_gputrain.cli.main import main
from pytest_gputrain.gate.baseline_changes import loosened
from pytest_gputrain.records import FORMAT, Baseline, Case
from pytest_gputrain.storage.baselines import BaselineStore
from pytest_gputrain.storage.predictions import PredictionStore

COMMITTED = Path(__file__).parents[2] / "baselines"
OTHER = CASE.replace(model="gemma-7b")


def entry(case: Case) -> Baseline:
    run = baseline_run(environment=cpu_environment(), date="2026-01-31T12:00:00Z", flops_per_step=8 * 10**14)
    return baseline(run, run, case=Case(**case.identity()), device="cpu")


def record(folder: Path, *cases: Case) -> Path:
    return BaselineStore(folder).update("cpu", "llm", {str(case): entry(case) for case in cases or (CASE, OTHER)})


def predict(folder: Path) -> Path:
    return PredictionStore(folder).update("h100", "llm", {str(CASE): recorded(prediction())})


def problems(folder: Path) -> list[str]:
    """What the check says, without the folder."""
    return [str(problem).removeprefix(f"{folder}/") for problem in check(folder)]


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the document of a file, which is then written as an update writes it."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document, indent=1))


def line_of(path: Path, text: str) -> int:
    return next(number for number, line in enumerate(path.read_text().splitlines(), 1) if text in line)


def test_the_committed_baselines_are_sound(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(list(COMMITTED.rglob("*.json"))) > 10
    assert main(["check-baselines", str(COMMITTED)]) == 0
    assert capsys.readouterr().out == ""


def test_what_an_update_writes_is_sound(tmp_path: Path) -> None:
    swept = CASE.replace(batch_size=4, learning_rate=1e-5, steps=20, named=("batch_size", "learning_rate", "steps"))
    record(tmp_path, CASE, OTHER, swept)
    predict(tmp_path)
    assert problems(tmp_path) == []


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whatever_line_stands_twice_is_found(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write = data.draw(st.sampled_from([record, predict]))
        path = write(Path(folder))
        lines = path.read_text().splitlines(keepends=True)
        at = data.draw(st.integers(0, len(lines) - 1))
        path.write_text("".join([*lines[:at], lines[at], *lines[at:]]))
        assert [problem.path for problem in check(Path(folder))][:1] == [path]


def test_every_merge_marker_is_told_by_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = record(tmp_path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], "<<<<<<< HEAD", lines[4], "=======", lines[4], ">>>>>>> branch", *lines[5:]]))
    assert main(["check-baselines", str(tmp_path)]) == 1
    marker = "a merge-conflict marker; take one side, or record again"
    assert capsys.readouterr().out.splitlines() == [f"{path}:{line}: {marker}" for line in (5, 7, 9)]


def test_a_case_that_stands_twice_is_told_where_it_does_again(tmp_path: Path) -> None:
    path = record(tmp_path)
    lines = path.read_text().splitlines()
    begin = line_of(path, f'"{OTHER}": {{') - 1
    end = line_of(path, f'"{CASE}": {{') - 1
    path.write_text("\n".join([*lines[:end], *lines[begin:end], *lines[end:]]))
    assert problems(tmp_path) == [f"cpu/llm.json:{end + 1}: {OTHER} occurs here a second time; delete one of them"]


def test_a_name_that_its_case_does_not_have_is_told(tmp_path: Path) -> None:
    path = record(tmp_path)
    path.write_text(path.read_text().replace('"batch_size": 2', '"batch_size": 2', 1).replace(f'"{CASE}"', f'"{CASE}-new"'))
    line = line_of(path, f'"{CASE}-new"')
    (sentence,) = problems(tmp_path)
    assert sentence.startswith(
        f"cpu/llm.json:{line}: {CASE}-new is not the name of the case in it, {CASE}, so no run finds it; "
    )


@pytest.mark.parametrize("suffix", ["-batch_size=3", "-batch_size", "-colour=red", "x", "-batch_size=2x", "é"])
def test_only_knobs_with_the_values_of_the_case_are_in_its_name(tmp_path: Path, suffix: str) -> None:
    path = BaselineStore(tmp_path).update("cpu", "llm", {f"{CASE}{suffix}": entry(CASE)})
    line = line_of(path, f'"{CASE}{suffix}"')
    assert problems(tmp_path)[0].startswith(f"cpu/llm.json:{line}: {CASE}{suffix} is no name of the case in it")


def test_an_edited_figure_in_another_form_is_told_by_its_line(tmp_path: Path) -> None:
    path = record(tmp_path)
    line = line_of(path, '"step_seconds"')
    path.write_text(path.read_text().replace("[1.0, 1.0, 1.0]", "[1.0,1.0,1.0]", 1))
    (sentence,) = problems(tmp_path)
    assert sentence.startswith(f'cpu/llm.json:{line}: not as an update writes it, which has "step_seconds": [1.0, 1.0, 1.0]')


def test_an_environment_under_another_name_than_its_own_is_told(tmp_path: Path) -> None:
    path = record(tmp_path)
    path.write_text(path.read_text().replace("node-1", "node-2"))
    assert problems(tmp_path)[0].startswith(f"cpu/llm.json:{line_of(path, 'device_name') - 1}: not as an update writes it")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda file: file.update(format=FORMAT + 1),
            f"1: has format {FORMAT + 1}, this version reads format {FORMAT};",
        ),
        (lambda file: file.update(suite="other"), "1: says that it holds other of cpu; move it to where it belongs,"),
        (lambda file: file["cases"][str(CASE)].update(runs=[]), f"LINE: holds no run for {CASE}; delete the entry"),
        (lambda file: file["cases"][str(CASE)].update(scale="tiny"), f"LINE: gives {CASE} the scale tiny;"),
        (
            lambda file: file["cases"][str(CASE)].pop("case"),
            "LINE: is not a baseline file: Object missing required field `case` in",
        ),
        (
            lambda file: file["cases"][str(CASE)]["case"].update(precision="fp16"),
            f"LINE: names in {CASE} the precision 'fp16', which is called 'fp16-amp' (autocast over weights in fp32);",
        ),
        (lambda file: file["environments"].clear(), "LINE: refers to the environment"),
        (
            lambda file: next(iter(file["environments"].values())).update(packages=5),
            "6: holds no sound environment ",
        ),
    ],
)
def test_what_a_run_would_refuse_is_told(tmp_path: Path, change: Callable[[dict[str, Any]], object], sentence: str) -> None:
    path = record(tmp_path, CASE)
    edit(path, change)
    (problem,) = problems(tmp_path)
    assert sentence.replace("LINE", str(line_of(path, f'"{CASE}": {{'))) in problem
    assert str(tmp_path) not in problem


@pytest.mark.parametrize("name", ["suite", "step_seconds"])
def test_what_python_s_json_reads_and_the_store_does_not_has_its_line(tmp_path: Path, name: str) -> None:
    path = record(tmp_path, CASE)
    line = line_of(path, f'"{name}"')
    path.write_text(re.sub(rf'("{name}": )[^\n]+', r"\1NaN,", path.read_text(), count=1))
    assert problems(tmp_path)[0].startswith(f"cpu/llm.json:{line}: is not a baseline file: ")


def test_a_problem_is_one_line_whatever_the_name_of_its_case(tmp_path: Path) -> None:
    path = BaselineStore(tmp_path).update("cpu", "llm", {"a\nb": entry(CASE)})
    edit(path, lambda file: file["cases"]["a\nb"].update(runs=[]))
    line = line_of(path, '"a\\nb"')
    assert problems(tmp_path) == [f"cpu/llm.json:{line}: holds no run for a b; delete the entry and record it again"]


def test_json_that_is_cut_off_is_told_by_its_line(tmp_path: Path) -> None:
    path = record(tmp_path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:10]))
    assert problems(tmp_path)[0].startswith("cpu/llm.json:10: not JSON: ")


def test_predictions_are_checked_too(tmp_path: Path) -> None:
    path = predict(tmp_path)
    path.write_text(path.read_text().replace('"peak_phase": "backward"', '"peak_phase": "nap"'))
    assert problems(tmp_path)[0].startswith(
        f"predicted/h100/llm.json:{line_of(path, str(CASE))}: holds no sound prediction for "
    )


def test_published_tables_are_checked_too(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("place", [".", "cpu/old", "predicted", "published/2024"])
def test_files_where_no_run_looks_are_told(tmp_path: Path, place: str) -> None:
    path = record(tmp_path)
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    path.rename(tmp_path / place / "llm.json")
    (sentence,) = problems(tmp_path)
    assert ":1: no run looks for a baseline here, but in " in sentence


def test_runs_of_one_session_on_a_gpu_are_warned_of_and_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = "nvidia-h100-80gb-hbm3"
    gpu = baseline(*[baseline_run()] * 5, case=Case(**CASE.identity()))
    path = BaselineStore(tmp_path).update(folder, "llm", {str(CASE): gpu})
    assert main(["check-baselines", str(tmp_path)]) == 0
    assert capsys.readouterr().out == (
        f"{path}:1: warning: all runs of 1 case are of one session each, so they do not tell how much days differ\n"
    )
    several = baseline(*(baseline_run(session=session) for session in "ab"), case=Case(**CASE.identity()))
    BaselineStore(tmp_path).update(folder, "llm", {str(CASE): several})
    assert problems(tmp_path) == []


def test_a_folder_that_is_not_there_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-baselines", str(tmp_path / "gone")]) == 2
    assert capsys.readouterr().err.endswith("gone is not a folder; give the one that --gpu-baseline-dir names\n")


# What lets more pass than before


def git(folder: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=me", "-c", "user.email=me@example.invalid")
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository whose folder of baselines is committed; the folder."""
    monkeypatch.delenv("CI", raising=False)
    folder = tmp_path / "baselines"
    record(folder)
    predict(folder)
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "first")
    return folder


def listed(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    """Exit status and lines of the list, without those of other problems."""
    status = main(["check-baselines", str(folder), "--since", "HEAD", *arguments])
    lines = capsys.readouterr().out.splitlines()
    return status, lines[next((at for at, line in enumerate(lines) if "since HEAD" in line), 0) :]


def lose_flops(document: dict[str, Any]) -> None:
    for run in document["cases"][str(CASE)]["runs"]:
        del run["flops_per_step"]


def raise_peak(document: dict[str, Any]) -> None:
    for run in document["cases"][str(CASE)]["runs"]:
        run["peak_allocated_bytes"] = run["peak_allocated_bytes"] * 105 // 100


def forget_run(document: dict[str, Any]) -> None:
    del document["cases"][str(CASE)]["runs"][1]


def run_out(document: dict[str, Any]) -> None:
    for run in document["cases"][str(CASE)]["runs"]:
        kept = {name: run[name] for name in ("environment", "date", "session", "commit") if name in run}
        run.clear()
        run |= {"outcome": "out_of_memory", "out_of": "device", **kept}


@pytest.mark.parametrize(
    ("change", "said", "lost"),
    [
        (lose_flops, r"without FLOPs, which was \S+ \wFLOP", 1),
        (raise_peak, r"peak memory \S+ GiB -> \S+ GiB \(\+5\.0 %\)", 0),
        (forget_run, r"2 runs -> 1", 1),
        (run_out, r"figures of (.+) -> out of memory of \1", 1),
        (lambda document: document["cases"].pop(str(CASE)), "removed", 1),
    ],
    ids=["FLOPs", "peak", "runs", "kind", "removed"],
)
def test_what_lets_more_pass_than_before_is_listed(
    repository: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], object], said: str, lost: int
) -> None:
    edit(repository / "cpu" / "llm.json", change)
    BaselineStore(repository).update("cpu", "llm", {})  # in the form of an update, so that only the change is wrong
    status, (first, line) = listed(repository, capsys)
    assert status == 0
    number = "1 baseline" if lost else "0 baselines"
    assert first == f"since HEAD: {number} removed or changed in kind, {1 - lost} raised"
    assert re.fullmatch(rf"cpu/llm\.json {re.escape(str(CASE))}: {said}", line), line
    assert listed(repository, capsys, "--strict")[0] == lost


def test_in_ci_what_is_not_compared_any_more_fails(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "predicted" / "h100" / "llm.json").unlink()
    monkeypatch.setenv("CI", "true")
    status, lines = listed(repository, capsys, "--format=markdown")
    assert status == 1
    assert lines == [
        "## since HEAD: 1 baseline removed or changed in kind, 0 raised",
        "",
        f"- predicted/h100/llm.json {CASE}: removed",
    ]
    assert listed(repository, capsys, "--no-strict")[0] == 0


def test_the_same_baselines_let_no_more_pass(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert listed(repository, capsys, "--strict") == (0, ["since HEAD: no baseline lets more pass"])
    record(repository, CASE.replace(model="gemma-2b"))
    assert listed(repository, capsys, "--strict") == (0, ["since HEAD: no baseline lets more pass"])


def test_a_folder_that_the_commit_has_not_lets_no_more_pass(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = repository.parent / "other"
    record(other)
    assert listed(other, capsys, "--strict") == (0, ["since HEAD: no baseline lets more pass"])


@pytest.mark.parametrize("reference", ["nowhere", "--output=made", "HEAD:baselines"])
def test_what_is_no_commit_is_told(repository: Path, capsys: pytest.CaptureFixture[str], reference: str) -> None:
    assert main(["check-baselines", str(repository), f"--since={reference}"]) == 2
    assert f"{reference!r} is not a commit of the repository of" in capsys.readouterr().err
    assert not (repository / "made").exists()


def test_a_suite_whose_test_file_is_gone_is_named(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_every_prediction_is_compared_under_its_own_conditions() -> None:
    """A run looks for that of its own versions, which need not be the last."""
    later = prediction(packages={"torch": "99"})
    before, raised = recorded(prediction(), later), prediction(peak_allocated_bytes=prediction().peak_allocated_bytes * 2)
    what = loosened(before, recorded(raised, later))
    assert (len(what.raised), what.lost) == (1, ())
    assert what.raised[0].startswith("peak memory ")
    assert what.raised[0].endswith("(+100.0 %)")
    assert loosened(before, recorded(prediction(fits=False), later)).lost == ("predicted to fit -> predicted not to fit",)
    assert loosened(before, before) == ((), ())
