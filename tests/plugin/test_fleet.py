"""Tests ``--gpu-executor``: its verdicts are those of a run on the node itself, and bad options are refused."""

import json
import platform

import pytest
from immediate_scheduler import ImmediateScheduler, stand_in
from plugin_project import (
    GEMMA,
    H100,
    H100_FOLDER,
    LLAMA,
    LLAMA_2,
    SUITE,
    Project,
    assert_refused,
    failures,
    only_sentence,
    recorded,
    skips,
)

from pytest_gputrain.cases.libraries import versions

FLEET = ("-m", "h100", "--gpu-executor=slurm")


@pytest.fixture
def scheduler(project: Project, monkeypatch: pytest.MonkeyPatch) -> ImmediateScheduler:
    """A fleet of nodes with eight H100s, for a project on a machine without a GPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    project.machine(None)
    project.answer(recorded(device_name=H100))
    project.write(test_tuning=SUITE)
    scheduler = stand_in(monkeypatch)
    scheduler.nodes = [(H100, 8)]
    return scheduler


@pytest.mark.parametrize("ask_seconds", [4.0, 0.0], ids=["tests ask", "all foreseen"])
def test_a_fleet_judges_as_the_node_itself_would(
    project: Project, scheduler: ImmediateScheduler, ask_seconds: float
) -> None:
    scheduler.ask_seconds = ask_seconds
    project.run(*FLEET, "--gpu-baseline-update", "--gpu-runs=3")
    project.answer(recorded(device_name=H100, slower=1.2), to=GEMMA)
    project.answer(recorded("crashed"), to=LLAMA_2)
    fleet_run = project.run(*FLEET, "--gpu-json=there.json")
    project.machine(H100, gpus=8)
    project.answer(recorded(device_name=H100))
    project.answer(recorded(device_name=H100, slower=1.2), to=GEMMA)
    project.answer(recorded("crashed"), to=LLAMA_2)
    local_run = project.run("-m", "h100", "--gpu-json=here.json")
    assert failures(fleet_run) == failures(local_run)
    assert list(failures(fleet_run)) == [f"test_tuning[{GEMMA}]", f"test_tuning[{LLAMA_2}]"]
    assert project.report("there.json")["results"] == project.report("here.json")["results"]


@pytest.fixture
def foreseeing(project: Project, scheduler: ImmediateScheduler) -> Project:
    """Three cases with baselines of a fleet that foresees all before tests ask."""
    project.run(*FLEET, "--gpu-baseline-update")
    scheduler.forget()
    scheduler.ask_seconds = 0.0
    return project


@pytest.mark.parametrize("option", ["--gpu-baseline-update", "--gpu-runs=5"])
def test_runs_that_are_known_from_the_start_are_submitted_in_turn(
    project: Project, scheduler: ImmediateScheduler, option: str
) -> None:
    scheduler.ask_seconds = 0.0
    project.run(*FLEET, option)
    assert scheduler.submitted == [LLAMA, GEMMA, LLAMA_2] * 5
    # As many as may wait, and those that fit when these are seen to be done.
    assert scheduler.during == [f"test_tuning[{LLAMA}]"] * 15
    if option == "--gpu-baseline-update":
        runs = {case: len(baseline["runs"]) for case, baseline in project.baselines("tuning", H100_FOLDER).items()}
        assert runs == {LLAMA: 5, GEMMA: 5, LLAMA_2: 5}


def test_what_takes_longest_by_the_history_is_submitted_first(project: Project, scheduler: ImmediateScheduler) -> None:
    scheduler.ask_seconds = 0.0
    for case, slower in ((LLAMA, 1.0), (GEMMA, 2.5), (LLAMA_2, 1.4)):
        project.answer(recorded(device_name=H100, slower=slower), to=case)
    # Of several runs, those that are left count together: 7.5, 5, 4.2, 3, 2.8, 2.5, 2, 1.4, 1.
    three = [GEMMA, GEMMA, LLAMA_2, LLAMA, LLAMA_2, GEMMA, LLAMA, LLAMA_2, LLAMA]
    for runs, submitted in ((1, [LLAMA, GEMMA, LLAMA_2]), (1, [GEMMA, LLAMA_2, LLAMA]), (3, three)):
        project.run(*FLEET, "--gpu-history=history.jsonl", f"--gpu-runs={runs}", "-k", "llama-3.1 or gemma or llama-2")
        assert scheduler.submitted == submitted
        scheduler.forget()


def test_baselines_that_there_are_not_yet_are_known_with_the_first_delivery(
    project: Project, scheduler: ImmediateScheduler
) -> None:
    scheduler.ask_seconds = 0.0
    project.run(*FLEET, "--gpu-baseline-update", "-k", "gemma")
    scheduler.forget()
    project.run(*FLEET, "--gpu-baseline-update-new-only")
    assert sorted(scheduler.submitted) == sorted([LLAMA] * 5 + [GEMMA] + [LLAMA_2] * 5)
    of_last = [test for case, test in zip(scheduler.submitted, scheduler.during, strict=True) if case == LLAMA_2]
    assert of_last == [f"test_tuning[{LLAMA}]"] * 5


SIZES = SUITE.replace('method=["lora"]', "batch_size=range(1, 11)")
TEN = SIZES.replace('"llama-3.1-8b", "gemma-7b", "llama-2-13b"', '"gemma-7b"')
"""Just as many as tell a slow day."""
FIRST, LAST = (f"gemma-7b-full-bf16-batch_size={size}" for size in (1, 10))


@pytest.mark.parametrize(
    ("suite", "late", "runs", "first", "doubtful", "submitted"),
    [
        (SUITE, {}, 1, LLAMA, LLAMA_2, [LLAMA, GEMMA, LLAMA_2, LLAMA_2, LLAMA_2]),
        # Of the first case, whose test waits, and of the last.
        (SUITE, {1: 8, 3: 4}, 2, LLAMA, LLAMA_2, [LLAMA, GEMMA, LLAMA_2] * 2 + [LLAMA_2]),
        # Its test waits while all others come in.
        (TEN, {1: 8}, 1, FIRST, LAST, None),
    ],
    ids=["before its test asks", "a later run before the first", "ten cases"],
)
def test_a_case_in_doubt_is_run_again_before_its_test_asks(
    project: Project,
    scheduler: ImmediateScheduler,
    suite: str,
    late: dict[int, int],
    runs: int,
    first: str,
    doubtful: str,
    submitted: list[str] | None,
) -> None:
    project.write(test_tuning=suite)
    project.run(*FLEET, "--gpu-baseline-update")
    scheduler.forget()
    scheduler.ask_seconds, scheduler.late = 0.0, dict(late)
    project.answer(recorded(device_name=H100, slower=1.2), to=doubtful)
    assert list(failures(project.run(*FLEET, f"--gpu-runs={runs}"))) == [f"test_tuning[{doubtful}]"]
    assert scheduler.submitted.count(doubtful) == 3
    assert submitted in (None, scheduler.submitted)
    assert set(scheduler.during) == {f"test_tuning[{first}]"}


def test_a_case_of_two_names_is_submitted_once_and_nothing_by_collecting(
    project: Project, scheduler: ImmediateScheduler
) -> None:
    other = SUITE.replace("sequence_length=8192)", "sequence_length=8192, platforms=('h100', 'a100'))")
    project.write(test_another=other)
    project.run(*FLEET, "--collect-only")
    assert scheduler.orders == []
    project.run(*FLEET, "--gpu-runs=3").assert_outcomes(passed=6)
    assert sorted(scheduler.submitted) == sorted([LLAMA, GEMMA, LLAMA_2] * 3)


def test_what_a_limit_asks_for_is_foreseen_too(project: Project, scheduler: ImmediateScheduler) -> None:
    scheduler.ask_seconds = 0.0
    project.write(test_tuning=SUITE.replace("@pytest.mark.p", "@pytest.mark.gpu_limit(memory='1 GiB')\n@pytest.mark.p"))
    project.run(*FLEET).assert_outcomes(failed=3)
    assert sorted(scheduler.submitted) == sorted([LLAMA, GEMMA, LLAMA_2] * 3)
    assert set(scheduler.during) == {f"test_tuning[{LLAMA}]"}


@pytest.mark.parametrize(
    ("case", "ask_seconds"), [(LLAMA_2, 0.0), (LLAMA, 4.0)], ids=["by its delivery", "by its test, for both at once"]
)
def test_a_run_that_was_foreseen_and_is_not_asked_for_says_nothing(
    foreseeing: Project, scheduler: ImmediateScheduler, case: str, ask_seconds: float
) -> None:
    scheduler.ask_seconds = ask_seconds
    # The second is within the limit, which settles it; the third is not.
    bigger = recorded(device_name=H100, bigger=2**34)
    foreseeing.answer(bigger, recorded(device_name=H100), bigger, to=case)
    foreseeing.run(*FLEET, "--gpu-json=report.json").assert_outcomes(passed=3)
    assert scheduler.submitted.count(case) == 3
    (result,) = [candidate for candidate in foreseeing.report()["results"] if candidate["key"] == case]
    peaks = [reply["peak_allocated_bytes"] for reply in result["replies"]]
    assert peaks == [bigger["peak_allocated_bytes"], bigger["peak_allocated_bytes"] - 2**34]


def test_a_day_on_which_all_are_slower_puts_none_of_them_in_doubt(project: Project, scheduler: ImmediateScheduler) -> None:
    many = SUITE.replace('method=["lora"]', 'method=["lora"], batch_size=[1, 2, 3, 4]')
    project.write(test_tuning=many)
    project.run(*FLEET, "--gpu-baseline-update", "--gpu-runs=5")
    project.answer(recorded(device_name=H100, slower=1.04))
    scheduler.ask_seconds = 0.0
    scheduler.orders.clear()
    fleet_run = project.run(*FLEET, "--gpu-json=there.json", "--gpu-time-tolerance=1%")
    project.machine(H100, gpus=8)
    project.answer(recorded(device_name=H100, slower=1.04))
    before = len(project.launches)
    local_run = project.run("-m", "h100", "--gpu-json=here.json", "--gpu-time-tolerance=1%")
    assert failures(fleet_run) == failures(local_run)
    assert project.report("there.json")["results"] == project.report("here.json")["results"]
    assert len(scheduler.orders) == len(project.launches) - before == 12


def test_what_becomes_no_baseline_is_run_no_further(project: Project, scheduler: ImmediateScheduler) -> None:
    project.write(test_tuning=SUITE + "    assert case.model != 'gemma-7b'\n")
    project.run(*FLEET, "--gpu-baseline-update").assert_outcomes(passed=2, failed=1)
    counts = {case: scheduler.submitted.count(case) for case in (LLAMA, GEMMA, LLAMA_2)}
    assert counts == {LLAMA: 5, GEMMA: 3, LLAMA_2: 5}
    assert len(set(scheduler.cancelled)) == 2
    scheduler.forget()
    project.baseline_file("tuning", H100_FOLDER).unlink()
    ask = "(gputrain.check if case.model == 'gemma-7b' else gputrain.measure)"  # which is run no further at the end
    project.write(test_tuning=SUITE.replace("gputrain.check", ask))
    project.run(*FLEET, "--gpu-baseline-update").assert_outcomes(passed=3)
    assert list(project.baselines("tuning", H100_FOLDER)) == [GEMMA]
    assert scheduler.submitted.count(GEMMA) == 5
    assert {case for case, test in zip(scheduler.submitted, scheduler.during, strict=True) if not test} == {GEMMA}


def test_a_study_runs_nothing_but_its_own_tasks(project: Project, scheduler: ImmediateScheduler) -> None:
    project.write(test_tuning=SUITE.replace("batch_size=2", "batch_size=5"))
    project.run(*FLEET, "-k", "gemma", "--gpu-find-batch", "-o", "gpu_find_batch_max=4", "--gpu-json=report.json")
    assert sorted({order.task.case.batch_size for order in scheduler.orders}) == [1, 2, 3, 4]
    scheduler.orders.clear()
    project.run(*FLEET, "-k", "gemma", "--gpu-loss=20", "--gpu-json=losses.json")
    assert all(order.task.curve for order in scheduler.orders)
    (declared,), (curves,) = project.report()["results"], project.report("losses.json")["results"]
    assert (declared["device"], curves["device"]) == (H100_FOLDER, H100_FOLDER)


def test_a_case_asks_for_what_it_takes_of_nodes(project: Project, scheduler: ImmediateScheduler) -> None:
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
def test_without_a_platform_the_cpus_of_the_nodes_train(project: Project, scheduler: ImmediateScheduler) -> None:
    scheduler.nodes = None
    project.answer(recorded("cpu_measured"))
    project.run("--gpu-executor=slurm", "--gpu-json=report.json").assert_outcomes(passed=3)
    assert {(order.task.scale, order.gpus, order.conditions.platform) for order in scheduler.orders} == {("tiny", 0, "cpu")}
    assert {result["device"] for result in project.report()["results"]} == {"cpu"}


def test_what_is_lost_fails_its_test_and_no_other(project: Project, scheduler: ImmediateScheduler) -> None:
    scheduler.refused = {GEMMA}
    result = project.run(*FLEET, "--gpu-json=report.json", "--gpu-history=history.jsonl")
    result.assert_outcomes(passed=2, failed=1)
    sentence = only_sentence(result, f"test_tuning[{GEMMA}]")
    assert sentence == (
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


def test_what_is_lost_is_told_as_lost_where_earlier_runs_were_resumed(
    project: Project, scheduler: ImmediateScheduler
) -> None:
    here = {"python": platform.python_version(), "packages": versions()}
    project.answer(recorded(device_name=H100, **here))
    project.run(*FLEET, "-k", "gemma", "--gpu-runs=1", "--gpu-json=first.json").assert_outcomes(passed=1, deselected=2)
    scheduler.refused = {GEMMA}
    result = project.run(*FLEET, "-k", "gemma", "--gpu-runs=2", "--gpu-resume=first.json", "--gpu-json=second.json")
    assert "was lost by the fleet" in only_sentence(result, f"test_tuning[{GEMMA}]")
    (lost,) = project.report("second.json")["results"]
    assert [reply["outcome"] for reply in lost["replies"]] == ["measured", "lost"]


def test_a_node_that_is_not_what_was_asked_for_loses_the_case(project: Project, scheduler: ImmediateScheduler) -> None:
    wide = "gputrain.check(Case(model='gemma-7b', parallel='ddp', gpus=2, sequence_length=8192))"
    project.write(test_wider=f"from pytest_gputrain import Case\n\n\ndef test_wide(gputrain):\n    {wide}\n")
    for node, says in (
        (("NVIDIA A100-SXM4-80GB", 8), "the GPU here is a100"),
        ((H100, 1), "takes 2 GPUs of a node, and it sees 1"),
    ):
        scheduler.nodes = [node]
        sentence = only_sentence(project.run("--gpu-platform=h100", "--gpu-executor=slurm", "-k", "wide"), "test_wide")
        assert "was lost by the fleet" in sentence
        assert says in sentence
    scheduler.nodes = [("NVIDIA A100-SXM4-40GB", 8), ("NVIDIA A100-SXM4-80GB", 8)]
    result = project.run("-m", "a100", "--gpu-executor=slurm", "-k", "gemma", "--gpu-runs=2")
    sentence = only_sentence(result, f"test_tuning[{GEMMA}]")
    assert "ran on nvidia-a100-sxm4-40gb (" in sentence
    assert "and on nvidia-a100-sxm4-80gb (" in sentence
    assert "gpu_fleet_args" in sentence


def test_what_a_node_refuses_is_told_with_its_name(project: Project, scheduler: ImmediateScheduler) -> None:
    project.occupied(free_bytes=2**30, processes=1)
    sentence = only_sentence(project.run(*FLEET, "-k", "gemma", "-o", "gpu_foreign=error"), f"test_tuning[{GEMMA}]")
    assert "its GPUs are in use by" in sentence
    assert "(on " in sentence


def test_what_runs_in_the_pytest_process_is_refused(project: Project, scheduler: ImmediateScheduler) -> None:
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
    ("ini", "arguments", "sentence"),
    [
        *(
            ("", [*FLEET, other], f"--gpu-executor=slurm and {flag}* contradict each other: *")
            for other, flag in {
                "--gpu-predict": "--gpu-predict",
                "--gpu-isolation=inline": "--gpu-isolation",
                "--gpu-ids=0": "--gpu-ids",
                "-ogpu_rendezvous=node1": "gpu_rendezvous",
            }.items()
        ),
        (
            "",
            ["-m", "h100 or a100", *FLEET[2:]],
            "--gpu-executor=slurm asks for machines of one platform, and -m names h100, a100; name one of them",
        ),
        (
            "gpu_fleet_args = h1000: --partition=gpu",
            FLEET,
            "gpu_fleet_args: 'h1000' is unknown (did you mean 'h100'?); known: *",
        ),
    ],
)
def test_what_a_fleet_cannot_do_is_refused(
    project: Project, scheduler: ImmediateScheduler, ini: str, arguments: tuple[str, ...], sentence: str
) -> None:
    project.ini(ini)
    assert_refused(project, sentence, *arguments)


def test_a_scheduler_that_is_not_here_is_told_at_once(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.machine(None)
    monkeypatch.setenv("PATH", "")
    assert_refused(project, "--gpu-executor=slurm: sbatch, squeue, scancel not found on PATH; *", "--gpu-executor=slurm")


def test_nothing_of_a_fleet_is_imported_without_the_option(project: Project) -> None:
    project.write(
        test_modules="""
        import sys

        def test_modules(gputrain):
            assert [name for name in sys.modules if name.startswith("pytest_gputrain.execution.fleet")] == []
        """
    )
    project.spawn().assert_outcomes(passed=1)
