"""Tests that the plugin works together with pytest's own options and with other plugins."""

import pytest
from plugin_project import BUILD, GEMMA, H100_FOLDER, recorded

from pytest_gputrain.hardware.catalog import MARKERS


@pytest.mark.parametrize("absent", ["benchmark", "xdist", "cacheprovider", "capture", "junitxml"])
def test_it_works_without_another_plugin(suite, absent):
    suite.spawn("-p", f"no:{absent}", "--gpu-json=report.json").assert_outcomes(passed=3)
    assert len(suite.report()["results"]) == 3


def test_disabled_it_leaves_other_tests_alone(project):
    project.ini("gpu_strict = true")
    project.write(test_plain="def test_plain():\n    pass\n")
    result = project.spawn("-p", "no:gputrain")
    result.assert_outcomes(passed=1)
    assert result.ret == 0


def test_warnings_as_errors_do_not_hit_the_plugin(suite):
    suite.ini("filterwarnings = error", "addopts = --strict-markers --strict-config")
    suite.spawn("-W", "error", "--gpu-baseline-update").assert_outcomes(passed=3)


def test_collecting_runs_nothing_asks_no_driver_and_makes_no_folder(suite):
    (suite.path / "gpus.json").write_text("[]")
    conftest = suite.path / "conftest.py"
    conftest.write_text(conftest.read_text().replace("lambda: gpus", "lambda: 1 / 0"))
    for update in ([], ["--gpu-baseline-update"]):
        result = suite.run("--collect-only", "-q", *update)
        result.stdout.fnmatch_lines([f"test_tuning.py::test_tuning[[]{GEMMA}[]]"])
        assert (result.ret, suite.launches) == (0, [])
        assert not (suite.path / "baselines").exists()
    suite.run("-k", "gemma").assert_outcomes(failed=1, deselected=2)


def test_several_runs_ask_for_several_processes_and_for_more_where_they_disagree_but_none_failed(gated):
    gated.answer(recorded(), recorded(slower=1.5), recorded(slower=1.01), to=GEMMA)
    gated.run("--gpu-runs=3", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    assert len(gated.launches) == 4
    gated.answer(recorded("crashed"))
    gated.run("--gpu-runs=3", "-k", "llama-2").assert_outcomes(failed=1, deselected=2)
    assert len(gated.launches) == 5


def test_markers_are_listed_with_their_help_and_those_of_all_platforms_in_one_line(project):
    lines = project.run("--markers").stdout
    markers = [
        "PLATFORM: gputrain: *h200_nvl, *h100, *cpu",
        "gpu_limit(memory=*, waits=*",
        "gpu_tolerance(time=*, launches=*",
        "gpu_only_on(*reason=*the kinds are cpu, emulated, gpu",
    ]
    lines.fnmatch_lines_random([f"@pytest.mark.{marker}" for marker in markers])
    assert sum("gputrain:" in line for line in lines.lines) == len(markers)


def test_the_marker_of_every_platform_is_registered(project):
    marks = "\n".join(f"@pytest.mark.{marker}" for marker in MARKERS)
    project.write(test_marked=f"import pytest\n\n\n{marks}\ndef test_it():\n    pass\n")
    for marker in ("h100", "cpu"):
        project.run("--strict-markers", "-m", marker).assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("test", "names", "options"),
    [
        (
            f"{BUILD}\n\ndef test_mine(gputrain):\n    gputrain.check(build, precision='fp32', steps=2)\n",
            {"torch", "numpy", "transformers", "peft"},
            ["--gpu-baseline-update", "--gpu-json=report.json"],
        ),
        (
            "import signal\n\n\ndef test_plain():\n    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL\n",
            {"torch", "rich", "pynvml", "psutil"},
            ["-p", "no:xdist", "-p", "no:benchmark"],
        ),
    ],
    ids=["a case", "no case"],
)
def test_pytest_imports_nothing_that_trains_and_without_cases_changes_nothing(project, test, names, options):
    (project.path / "conftest.py").write_text(
        "import sys\nfrom pathlib import Path\n\n\ndef pytest_unconfigure(config):\n"
        f"    Path('imported.txt').write_text(repr(sorted({names} & set(sys.modules))))\n"
    )
    project.write(test_mine=test)
    project.spawn(*options).assert_outcomes(passed=1)
    assert (project.path / "imported.txt").read_text() == "[]"


def test_cases_of_fixtures_and_classes_are_recorded_beside_the_ini_file_whatever_the_current_folder(h100, monkeypatch):
    h100.write(
        test_classes="""
        import pytest
        from pytest_gputrain import Case, grid

        CASES = grid(Case(sequence_length=64), model=["gemma-7b"], method=["lora"], batch_size=[1, 2])


        @pytest.fixture(params=CASES, ids=str)
        def case(request):
            return request.param


        class TestGroup:
            def test_from_a_fixture(self, gputrain, case):
                gputrain.check(case)
        """
    )
    (h100.path / "inner").mkdir()
    monkeypatch.chdir(h100.path / "inner")
    h100.run("..", "-m", "h100", "--gpu-baseline-update").assert_outcomes(passed=2)
    assert sorted(h100.baselines("classes", H100_FOLDER)) == [f"{GEMMA}-batch_size=1", f"{GEMMA}-batch_size=2"]
