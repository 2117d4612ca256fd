"""Tests that a run neither destroys files that it did not make, nor empties reports of earlier ones."""

import json
import os
import stat

import pytest
from plugin_project import GEMMA, assert_refused, recorded

OUTPUTS = ("--gpu-json=report.json", "--gpu-html=page.html", "--gpu-summary=own.md", "--gpu-history=history.jsonl")
REPORTS = ("report.json", "page.html", "own.md")
PLAIN = "def test_plain():\n    pass\n"
KEPT = "no case was run, so nothing was written to *own.md, *report.json, *page.html"


@pytest.mark.parametrize("option", ["json", "html", "summary", "history"])
def test_what_is_no_file_is_refused_before_the_first_case_and_stays(suite, option):
    odd = {kind: suite.path / kind for kind in ("fifo", "device", "folder")}
    os.mkfifo(odd["fifo"])
    odd["folder"].mkdir()
    try:
        os.mknod(odd["device"], 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:  # only root can make a device
        del odd["device"]
    for kind, path in odd.items():
        before = path.stat()
        sentence = f"--gpu-{option}: * cannot be written (it is not a regular file); give another file"
        assert_refused(suite, sentence, f"--gpu-{option}={kind}")
        assert (path.stat().st_mode, path.stat().st_ino) == (before.st_mode, before.st_ino)
    (suite.path / "file").write_text("")
    sentence = f"--gpu-{option}: * cannot be written (Not a directory); give another file"
    assert_refused(suite, sentence, f"--gpu-{option}=file/deep/x")
    before_code = (suite.path / "test_tuning.py").read_bytes()
    assert_refused(suite, f"--gpu-{option}: *test_tuning.py is code, *", f"--gpu-{option}", "test_tuning.py")
    assert (suite.path / "test_tuning.py").read_bytes() == before_code


def test_what_pytest_prints_to_is_refused(suite):
    assert_refused(suite, "--gpu-json: * cannot be written (*); give another file", "--gpu-json=/dev/stdout")


def test_links_stay_and_lead_to_what_was_written(suite):
    (suite.path / "kept").mkdir()
    names = [option.partition("=")[2] for option in OUTPUTS]
    for name in names:
        (suite.path / name).symlink_to(f"kept/{name}")
    suite.run(*OUTPUTS, "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    for name in names:
        assert (suite.path / name).is_symlink()
        assert GEMMA in (suite.path / "kept" / name).read_text()


def test_reports_stay_where_no_case_was_run_and_listing_makes_no_file(suite):
    result = suite.run("--collect-only", *(option.replace("=", "=deep/") for option in OUTPUTS))
    assert "nothing was written" not in result.stdout.str()
    assert not (suite.path / "deep").exists()
    suite.run(*OUTPUTS).assert_outcomes(passed=3)
    before = {name: (suite.path / name).read_bytes() for name in REPORTS}
    suite.write(test_plain=PLAIN, test_broken="from pytest_gputrain import Case\n\nassert not Case\n")
    for arguments in (["--collect-only"], ["-k", "plain"], ["test_broken.py"]):
        result = suite.run(*OUTPUTS, "--continue-on-collection-errors", *arguments)
        result.stdout.fnmatch_lines([KEPT])
        assert {name: (suite.path / name).read_bytes() for name in REPORTS} == before


def test_a_run_without_figures_is_reported_as_one(suite):
    suite.answer(recorded("crashed"))
    suite.write(test_zz="import pytest\n\n\n@pytest.mark.skip\ndef test_zz(gputrain):\n    pass\n")
    suite.run(*OUTPUTS).assert_outcomes(failed=3, skipped=1)
    assert set(suite.verdicts().values()) == {"failed"}
    assert suite.report()["notes"][0] == "no case gave figures: 3 failed, 1 skipped"
    assert "3 failed" in (suite.path / "own.md").read_text()


def test_a_test_in_which_a_run_was_ended_has_not_passed(project):
    project.write(test_cut_off="import pytest\n\n\ndef test_cut_off(gputrain):\n    pytest.exit('over')\n")
    result = project.run()
    result.stdout.fnmatch_lines(["*Exit: over*"])
    result.stdout.no_fnmatch_line("*1 passed*")


def test_a_run_whose_cases_were_all_skipped_is_reported_as_one(project):
    project.machine(None)
    project.write(test_tuning="def test_it(gputrain):\n    import pytest\n\n    pytest.skip('no network')\n")
    for name in REPORTS:
        (project.path / name).write_text("{}")
    result = project.run(*OUTPUTS)
    result.assert_outcomes(skipped=1)
    sentence = "nothing was measured: every case was skipped (no network)"
    result.stdout.fnmatch_lines([sentence])
    report = json.loads((project.path / "report.json").read_text())
    assert report["results"] == []
    assert report["notes"] == [sentence, "not compared: 1 test skipped"]
    assert "no case has run" in (project.path / "own.md").read_text()
    assert "no network" in (project.path / "page.html").read_text()
