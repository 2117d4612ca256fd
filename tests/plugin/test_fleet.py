"""Tests ``--gpu-executor``: its verdicts are those of a run on the node itself, and bad options are refused."""

import json

import pytest
from immediate_scheduler import stand_in
from plugin_project import (
    GEMMA,
    H100,
    H100_FOLDER,
    LLAMA,
    LLAMA_2,
    SUITE,
    assert_refused,
    failures,
    only_sentence,
    recorded,
    skips,
)

FLEET = ("-m", "h100", "--gpu-executor=slurm")
IN_FIRST = f"test_tuning[{LLAMA}]"


def slower(times):
    return recorded(device_name=H100, slower=times)


@pytest.fixture
def scheduler(project, monkeypatch):
    """A fleet of nodes with eight H100s that foresees all, for a project on a machine without a GPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    project.machine(None)
    project.answer(slower(1.0))
    project.write(test_tuning=SUITE)
    scheduler = stand_in(monkeypatch)
    scheduler.nodes = [(H100, 8)]
    scheduler.ask_seconds = 0.0
    return scheduler


def assert_same_here(project, fleet_run, *arguments):
    """A run on a machine like the nodes has the failures and the results that ``there.json`` has."""
    replies = (project.path / "replies.json").read_text()
    project.machine(H100, gpus=8)
    (project.path / "replies.json").write_text(replies)
    assert failures(project.run("-m", "h100", "--gpu-json=here.json", *arguments)) == failures(fleet_run)
    assert project.report("there.json")["results"] == project.report("here.json")["results"]


@pytest.mark.parametrize("ask_seconds", [4.0, 0.0], ids=["tests ask", "all foreseen"])
def test_a_fleet_judges_as_the_node_itself_would(project, scheduler, ask_seconds):
    scheduler.ask_seconds = ask_seconds
    project.run(*FLEET, "--gpu-baseline-update", "--gpu-runs=3")
    project.answer(slower(1.2), to=GEMMA)
    project.answer(recorded("crashed"), to=LLAMA_2)
    fleet_run = project.run(*FLEET, "--gpu-json=there.json")
    assert list(failures(fleet_run)) == [f"test_tuning[{GEMMA}]", f"test_tuning[{LLAMA_2}]"]
    assert_same_here(project, fleet_run)


def test_a_day_on_which_all_are_slower_puts_none_of_them_in_doubt(project, scheduler):
    project.write(test_tuning=SUITE.replace('method=["lora"]', 'method=["lora"], batch_size=[1, 2, 3, 4]'))
    project.run(*FLEET, "--gpu-baseline-update", "--gpu-runs=5")
    scheduler.forget()
    project.answer(slower(1.04))
    fleet_run = project.run(*FLEET, "--gpu-json=there.json", "--gpu-time-tolerance=1%")
    launched = len(project.launches)
    assert_same_here(project, fleet_run, "--gpu-time-tolerance=1%")
    assert len(scheduler.orders) == len(project.launches) - launched == 12


# Which jobs are submitted, and when


@pytest.mark.parametrize("option", ["--gpu-baseline-update", "--gpu-runs=5"])
def test_runs_that_are_known_from_the_start_are_submitted_in_turn(project, scheduler, option):
    project.run(*FLEET, option)
    assert scheduler.submitted == [LLAMA, GEMMA, LLAMA_2] * 5
    # As many as may wait, and those that fit when these are seen to be done.
    assert scheduler.during == [IN_FIRST] * 15


def test_what_takes_longest_by_the_history_is_submitted_first(project, scheduler):
    for case, times in ((LLAMA, 1.0), (GEMMA, 2.5), (LLAMA_2, 1.4)):
        project.answer(slower(times), to=case)
    # Of several runs, those that are left count together: 7.5, 5, 4.2, 3, 2.8, 2.5, 2, 1.4, 1.
    three = [GEMMA, GEMMA, LLAMA_2, LLAMA, LLAMA_2, GEMMA, LLAMA, LLAMA_2, LLAMA]
    for runs, submitted in ((1, [LLAMA, GEMMA, LLAMA_2]), (1, [GEMMA, LLAMA_2, LLAMA]), (3, three)):
        project.run(*FLEET, "--gpu-history=history.jsonl", f"--gpu-runs={runs}")
        assert scheduler.submitted == submitted
        scheduler.forget()


def test_baselines_that_there_are_not_yet_are_known_with_the_first_delivery(project, scheduler):
    project.run(*FLEET, "--gpu-baseline-update", "-k", "gemma")
    scheduler.forget()
    project.run(*FLEET, "--gpu-baseline-new")
    assert sorted(scheduler.submitted) == sorted([LLAMA] * 5 + [GEMMA] + [LLAMA_2] * 5)
    of_last = [test for case, test in zip(scheduler.submitted, scheduler.during, strict=True) if case == LLAMA_2]
    assert of_last == [IN_FIRST] * 5


TEN = SUITE.replace('method=["lora"]', "batch_size=range(1, 11)").replace(
    '"llama-3.1-8b", "gemma-7b", "llama-2-13b"', '"gemma-7b"'
)
"""Just as many as tell a slow day."""


@pytest.mark.parametrize(
    ("suite", "late", "runs", "doubtful", "submitted"),
    [
        (SUITE, {}, 1, LLAMA_2, [LLAMA, GEMMA, LLAMA_2, LLAMA_2, LLAMA_2]),
        # A later run of the last case comes before the first one of the first case, whose test waits.
        (SUITE, {1: 8, 3: 4}, 2, LLAMA_2, [LLAMA, GEMMA, LLAMA_2] * 2 + [LLAMA_2]),
        # The test of the first case waits while all others come in.
        (TEN, {1: 8}, 1, "gemma-7b-full-bf16-batch_size=10", None),
    ],
    ids=["before its test asks", "a later run before the first", "ten cases"],
)
def test_a_case_in_doubt_is_run_again_before_its_test_asks(project, scheduler, suite, late, runs, doubtful, submitted):
    project.write(test_tuning=suite)
    project.run(*FLEET, "--gpu-baseline-update")
    scheduler.forget()
    scheduler.late = dict(late)
    project.answer(slower(1.2), to=doubtful)
    assert list(failures(project.run(*FLEET, f"--gpu-runs={runs}"))) == [f"test_tuning[{doubtful}]"]
    assert scheduler.submitted.count(doubtful) == 3
    assert submitted in (None, scheduler.submitted)
    assert len(set(scheduler.during)) == 1, "while the first test waits"


@pytest.mark.parametrize(
    ("case", "ask_seconds"), [(LLAMA_2, 0.0), (LLAMA, 4.0)], ids=["by its delivery", "by its test, for both at once"]
)
def test_a_run_that_was_foreseen_and_is_not_asked_for_says_nothing(project, scheduler, case, ask_seconds):
    project.run(*FLEET, "--gpu-baseline-update")
    scheduler.forget()
    scheduler.ask_seconds = ask_seconds
    # The second is within the limit, which settles it; the third is not.
    bigger = recorded(device_name=H100, bigger=2**34)
    project.answer(bigger, slower(1.0), bigger, to=case)
    project.run(*FLEET, "--gpu-json=report.json").assert_outcomes(passed=3)
    assert scheduler.submitted.count(case) == 3
    (result,) = [candidate for candidate in project.report()["results"] if candidate["key"] == case]
    assert len(result["replies"]) == 2


def test_a_case_of_two_names_is_submitted_once_with_what_its_limit_asks_for_and_nothing_by_collecting(project, scheduler):
    limited = SUITE.replace("@pytest.mark.p", "@pytest.mark.gpu_limit(memory='1 GiB')\n@pytest.mark.p")
    other = limited.replace("sequence_length=8192)", "sequence_length=8192, platforms=('h100', 'a100'))")
    project.write(test_tuning=limited, test_another=other)
    project.run(*FLEET, "--collect-only")
    assert scheduler.orders == []
    project.run(*FLEET).assert_outcomes(failed=6)
    assert sorted(scheduler.submitted) == sorted([LLAMA, GEMMA, LLAMA_2] * 3)
    assert set(scheduler.during) == {IN_FIRST}


def test_what_becomes_no_baseline_is_run_no_further(project, scheduler):
    scheduler.ask_seconds = 4.0
    project.write(test_tuning=SUITE + "    assert case.model != 'gemma-7b'\n")
    project.run(*FLEET, "--gpu-baseline-update").assert_outcomes(passed=2, failed=1)
    assert {case: scheduler.submitted.count(case) for case in (LLAMA, GEMMA, LLAMA_2)} == {LLAMA: 5, GEMMA: 3, LLAMA_2: 5}
    assert len(set(scheduler.cancelled)) == 2


def test_a_study_runs_nothing_but_its_own_tasks(project, scheduler):
    project.run(*FLEET, "-k", "gemma", "--gpu-find-batch", "-o", "gpu_find_batch_max=4", "--gpu-json=report.json")
    assert sorted({order.task.case.batch_size for order in scheduler.orders}) == [1, 2, 3, 4]
    assert project.report()["results"][0]["device"] == H100_FOLDER
    scheduler.forget()
    project.run(*FLEET, "-k", "gemma", "--gpu-loss=20")
    assert scheduler.orders
    assert all(order.task.curve for order in scheduler.orders)


def test_a_case_asks_for_what_it_takes_of_nodes(project, scheduler):
    project.write(
        test_tuning="""
        import pytest
        from pytest_gputrain import Case

        @pytest.mark.parametrize("gpus", [2, 16, 12, 32])
        def test_wide(gputrain, gpus):
            gputrain.measure(Case(model="gemma-7b", parallel="ddp", gpus=gpus, named=("gpus",), sequence_length=8192))
        """
    )
    result = project.run("--gpu-platform=h100", "--gpu-executor=slurm", "-o", "gpu_nodes=2")
    assert [(order.task.nodes, order.gpus) for order in scheduler.orders] == [(1, 2), (2, 8)]
    assert [launch["nodes"] for launch in project.launches] == [1, 2]
    assert skips(result) == {
        "test_wide[12]": "needs 12 GPUs, found 8; a case takes whole nodes, so no number of nodes fits",
        "test_wide[32]": "needs 32 GPUs, found 8; -o gpu_nodes=4 takes those of 4 nodes",
    }


@pytest.mark.slow
def test_without_a_platform_the_cpus_of_the_nodes_train(project, scheduler):
    scheduler.nodes = None
    project.answer(recorded("cpu_measured"))
    project.run("--gpu-executor=slurm", "--gpu-json=report.json").assert_outcomes(passed=3)
    assert {(order.task.scale, order.gpus, order.conditions.platform) for order in scheduler.orders} == {("tiny", 0, "cpu")}
    assert {result["device"] for result in project.report()["results"]} == {"cpu"}


# What a fleet loses or refuses


def test_what_is_lost_fails_its_test_and_no_other(project, scheduler):
    scheduler.refused = {GEMMA}
    result = project.run(*FLEET, "--gpu-json=report.json", "--gpu-history=history.jsonl")
    result.assert_outcomes(passed=2, failed=1)
    assert only_sentence(result, f"test_tuning[{GEMMA}]") == (
        f"{GEMMA} was lost by the fleet, which says nothing about the case: no such partition; ask otherwise"
    )
    (lost,) = [result for result in project.report()["results"] if result["key"] == GEMMA]
    assert [(reply["outcome"], reply["cause"]) for reply in lost["replies"]] == [("lost", "not_scheduled")]
    assert lost["verdict"]["status"] == "failed"
    lines = [json.loads(line) for line in (project.path / "history.jsonl").read_text().splitlines()]
    assert {line["key"]: line["outcome"] for line in lines} == {LLAMA: "measured", GEMMA: "lost", LLAMA_2: "measured"}
    result.stdout.re_match_lines([r"Gemma 7B .* lost .*failed"])
    project.run(*FLEET, "--gpu-baseline-update", "--gpu-runs=1")
    assert sorted(project.baselines("tuning", H100_FOLDER)) == sorted([LLAMA, LLAMA_2])


@pytest.mark.parametrize(
    ("nodes", "arguments", "says"),
    [
        ([("NVIDIA A100-SXM4-80GB", 8)], ["--gpu-platform=h100"], ["was lost by the fleet", "the GPU here is a100"]),
        ([(H100, 1)], ["--gpu-platform=h100"], ["was lost by the fleet", "takes 2 GPUs of a node, and it sees 1"]),
        (
            [("NVIDIA A100-SXM4-40GB", 8), ("NVIDIA A100-SXM4-80GB", 8)],
            ["--gpu-platform=a100", "--gpu-runs=2"],
            ["ran on nvidia-a100-sxm4-40gb (", "and on nvidia-a100-sxm4-80gb (", "gpu_fleet_args"],
        ),
        ([(H100, 8)], ["--gpu-platform=h100", "-ogpu_foreign=error"], ["its GPUs are in use by", "(on "]),
    ],
    ids=["another GPU", "too few", "two kinds", "in use"],
)
def test_a_node_that_is_not_what_was_asked_for_fails_the_case_with_its_name(project, scheduler, nodes, arguments, says):
    wide = "gputrain.check(Case(model='gemma-7b', parallel='ddp', gpus=2, sequence_length=8192))"
    project.write(test_tuning=f"from pytest_gputrain import Case\n\n\ndef test_wide(gputrain):\n    {wide}\n")
    project.occupied(free_bytes=2**30, processes=1)
    scheduler.nodes = nodes
    sentence = only_sentence(project.run("--gpu-executor=slurm", *arguments), "test_wide")
    assert [words for words in says if words not in sentence] == [], sentence


def test_what_runs_in_the_pytest_process_is_refused(project, scheduler):
    project.write(
        test_tuning="""
        def test_inline(gputrain):
            gputrain.check(lambda setup: None, inline=True)

        def test_lent(gpu):
            raise AssertionError
        """
    )
    result = project.run("--gpu-platform=h100", "--gpu-executor=slurm")
    assert "deselect its test" in only_sentence(result, "test_inline")
    assert list(skips(result)) == ["test_lent"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([*FLEET, "--gpu-emulate"], "--gpu-executor=slurm and --gpu-emulate* contradict each other: *"),
        ([*FLEET, "--gpu-isolation=inline"], "--gpu-executor=slurm and --gpu-isolation* contradict each other: *"),
        (
            ["-m", "h100 or a100", *FLEET[2:]],
            "--gpu-executor=slurm asks for machines of one platform, and -m names h100, a100*",
        ),
        ([*FLEET, "-ogpu_fleet_args=h1000: -p gpu"], "gpu_fleet_args: 'h1000' is unknown (did you mean 'h100'?); known: *"),
    ],
)
def test_what_a_fleet_cannot_do_is_refused(project, scheduler, arguments, sentence):
    assert_refused(project, sentence, *arguments)
