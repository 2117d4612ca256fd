"""What a step asks of a CPU is recorded with a baseline, and growth fails with the line that asks for more."""

import json
from pathlib import Path

import pytest

PROGRAM = """
def train(setup):
    import torch

    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1)).to(setup.device)
    setup.watch(net)
    optimizer = torch.optim.AdamW(net.parameters())
    batch = torch.ones(4, 8, device=setup.device)
    while True:
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


{markers}
def test_train(gputrain):
    gputrain.check(train, precision="fp32", batch_size=4, steps=2, warmup=1)
"""
WORSE = PROGRAM.replace("        optimizer.step()\n", "        loss.item()\n        optimizer.step()\n")
SAID = "depend on its trained weights, each a wait on a GPU, 1 time a step (0 before): 1 more at test_mine.py:13"


def written(project, program, markers=""):
    project.write(test_mine="import pytest\n" + program.format(markers=markers))


@pytest.fixture
def recorded(project):
    """A project whose baseline has counts."""
    written(project, PROGRAM)
    project.run("--gpu-baseline-update").assert_outcomes(passed=1)
    return project


def counts_of(project):
    [case] = json.loads(project.baseline_file("mine", "cpu").read_text())["cases"].values()
    return case["runs"][0].get("counts")


@pytest.mark.slow
def test_a_value_that_is_read_fails_with_its_line_once_a_second_run_confirms_it(recorded):
    recorded.run("--gpu-strict").assert_outcomes(passed=1)
    written(recorded, WORSE)
    result = recorded.run("--gpu-json=report.json")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"*{SAID} in train, loss.item()*"])
    [entry] = recorded.report()["results"]
    assert len(entry["replies"]) == 2
    result = recorded.run("--gpu-baseline-update")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*reads 0 -> 1 a step*"])
    recorded.run("--gpu-strict").assert_outcomes(passed=1)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["off", "tell"])
def test_growth_passes_where_the_project_says_so(recorded, mode):
    written(recorded, WORSE)
    recorded.ini(f"gpu_counts = {mode}")
    result = recorded.run("--gpu-json=report.json", "--gpu-strict")
    result.assert_outcomes(passed=1)
    assert (SAID in result.stdout.str()) == (mode == "tell")
    [entry] = recorded.report()["results"]
    assert (entry["replies"][0]["counts"] is None) == (mode == "off")


@pytest.mark.slow
def test_an_optimizer_that_steps_again_is_told_at_first_and_when_it_changes(project):
    twice = PROGRAM.replace("        optimizer.step()\n", "        optimizer.step()\n" * 2)
    said = "updates again by the same optimizer {} time{} a step"
    written(project, twice)
    result = project.run("--gpu-baseline-update")
    result.assert_outcomes(passed=1)
    place = "(1 at test_mine.py:14 in train, optimizer.step())"
    result.stdout.fnmatch_lines([f"train-fp32-batch_size=4 {said.format(1, '')} {place}; yield after each update *"])
    assert "updates again" not in project.run("--gpu-strict").stdout.str()
    written(project, PROGRAM)
    result = project.run()
    result.stdout.fnmatch_lines([f"*; it also {said.format(0, 's')} (1 before), which is not judged; record it *"])
    assert counts_of(project)["kinds"][0]["repeated_updates"] == 1


@pytest.mark.slow
def test_a_baseline_without_counts_passes_and_an_update_adds_them(project):
    written(project, PROGRAM)
    project.ini("gpu_counts = off")
    project.run("--gpu-baseline-update").assert_outcomes(passed=1)
    assert counts_of(project) is None
    project.ini()
    result = project.run("--gpu-strict")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["*what its steps ask of a CPU was not recorded; record it again*"])
    project.run("--gpu-baseline-update").assert_outcomes(passed=1)
    counts = counts_of(project)
    assert counts["on_cpu"]
    assert counts["kinds"][0]["operators"] > 20


@pytest.mark.slow
def test_a_limit_holds_for_what_a_cpu_counts(project):
    markers = "@pytest.mark.gpu_limit(reads=0, waits=0)"
    written(project, WORSE, markers)
    result = project.run("--gpu-json=report.json")
    result.assert_outcomes(failed=1)
    [entry] = project.report()["results"]
    limits = {limit["metric"]: limit for limit in entry["verdict"]["limits"]}
    assert (limits["reads"]["status"], limits["reads"]["value"]) == ("over-limit", 1)
    assert "over its limit of 0: 1 at test_mine.py:13 in train, loss.item()" in limits["reads"]["note"]
    assert (limits["waits"]["status"], limits["waits"]["note"]) == ("not-judged", "a run on a CPU does not count waits")


# --- Public regressions

PROGRAMS = (Path(__file__).parents[1] / "emulated" / "mechanisms" / "mechanisms.py").read_text()
BY_COUNTS = {
    "item_each_step": "reads",
    "item_each_second_step": "reads",
    "small_operators": "operators",
    "tensor_by_tensor": "operators",
    "experts_loop": "reads",
    "recompiled": "compilations",
    "bucket_of_one": "collectives",
}
"""The figure that fails, by mechanism."""
UNSEEN = ("mask_on_host", "not_compiled", "slower_host")
"""Mechanisms whose counts a CPU does not tell."""
EACH_TIME = ("item_each_step", "recompiled", "bucket_of_one", "slower_host")
_SECONDS = 900


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [EACH_TIME, pytest.param(sorted({*BY_COUNTS, *UNSEEN} - {*EACH_TIME}), marks=pytest.mark.weekly)],
    ids=["each time", "weekly"],
)
def test_public_regressions_fail_by_the_figure_that_a_cpu_shows(project, monkeypatch, names):
    project.write(test_mechanisms=PROGRAMS)
    selected = ("-k", " or ".join(names), "--gpu-json=report.json", "--gpu-warmup=1", "--gpu-steps=2")
    failing_ones = len(BY_COUNTS.keys() & set(names))

    def run(*options):
        return project.pytester.runpytest_subprocess(*selected, *options, timeout=_SECONDS)

    run("--gpu-baseline-update").assert_outcomes(passed=len(names))
    monkeypatch.setenv("WITH_CAUSE", "1")
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    run().assert_outcomes(failed=failing_ones, passed=len(names) - failing_ones)
    for entry in project.report()["results"]:
        name = entry["nodeid"].partition("[")[2][:-1]
        failing = {metric["metric"] for metric in entry["verdict"]["metrics"] if metric["status"] == "regressed"}
        assert failing == set() if name in UNSEEN else BY_COUNTS[name] in failing, name
