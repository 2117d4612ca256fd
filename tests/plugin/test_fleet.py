"""Runs with ``--gpu-fleet``: what they say is what a run on the node itself would say; and what is refused."""

from __future__ import annotations

import json

import pytest
from at_once import AtOnce, stand_in
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

FLEET = ("-m", "h100", "--gpu-fleet=slurm")


@pytest.fixture
def engine(project: Project, monkeypatch: pytest.MonkeyPatch) -> AtOnce:
    """A fleet of nodes with eight H100s, for a project on a machine without a GPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    project.machine(None)
    project.answer(recorded(device_name=H100))
    project.write(test_tuning=SUITE)
    engine = stand_in(monkeypatch)
    engine.nodes = [(H100, 8)]
    return engine


def test_a_fleet_judges_as_the_node_itself_would(project: Project, engine: AtOnce) -> None:
    project.run(*FLEET, "--gpu-baseline-update", "--gpu-runs=3")
    project.answer(recorded(device_name=H100, slower=1.2), to=GEMMA)
    there = project.run(*FLEET, "--gpu-json=there.json")
    project.machine(H100, gpus=8)
    project.answer(recorded(device_name=H100))
    project.answer(recorded(device_name=H100, slower=1.2), to=GEMMA)
    here = project.run("-m", "h100", "--gpu-json=here.json")
    assert failures(there) == failures(here)
    assert list(failures(there)) == [f"test_tuning[{GEMMA}]"]
    assert project.report("there.json")["results"] == project.report("here.json")["results"]


def test_baselines_are_those_of_the_device_that_the_node_has(project: Project, engine: AtOnce) -> None:
    project.run(*FLEET, "--gpu-baseline-update")
    baselines = project.baselines("tuning", H100_FOLDER)
    assert sorted(baselines) == sorted([LLAMA, GEMMA, LLAMA_2])
    assert {len(baseline["runs"]) for baseline in baselines.values()} == {5}
    assert len(engine.orders) == 15


def test_first_runs_are_submitted_ahead_and_the_longest_first(project: Project, engine: AtOnce) -> None:
    for case, slower in ((LLAMA, 2.0), (GEMMA, 1.0), (LLAMA_2, 3.0)):
        project.answer(recorded(device_name=H100, slower=slower), to=case)
    project.run(*FLEET, "--gpu-history=history.jsonl")
    assert sorted(engine.submitted) == sorted([LLAMA, GEMMA, LLAMA_2])
    engine.orders.clear()
    project.run(*FLEET, "--gpu-history=history.jsonl", "-k", "llama-3.1 or gemma or llama-2")
    assert engine.submitted == [LLAMA_2, LLAMA, GEMMA]


def test_collecting_submits_nothing(project: Project, engine: AtOnce) -> None:
    project.run(*FLEET, "--collect-only")
    assert engine.orders == []


def test_a_case_asks_for_what_it_takes_of_nodes(project: Project, engine: AtOnce) -> None:
    project.write(
        test_tuning="""
        import pytest
        from pytest_gputrain import Case

        @pytest.mark.parametrize("gpus", [2, 16, 12, 32])
        def test_wide(gputrain, gpus):
            gputrain.measure(Case(model="gemma-7b", parallel="ddp", gpus=gpus, named=("gpus",), sequence_length=8192))
        """
    )
    result = project.run("--gpu-platform=h100", "--gpu-fleet=slurm", "--gpu-nodes=2")
    assert [(order.nodes, order.gpus) for order in engine.orders] == [(1, 2), (2, 8)]
    assert [launch["nodes"] for launch in project.launches] == [1, 2]
    assert skips(result) == {
        "test_wide[12]": "needs 12 GPUs, found 8; several nodes are taken whole, so no number of them fits",
        "test_wide[32]": "needs 32 GPUs, found 8; --gpu-nodes=4 takes those of 4 nodes",
    }


def test_without_a_platform_the_cpus_of_the_nodes_train(project: Project, engine: AtOnce) -> None:
    engine.nodes = None
    project.answer(recorded("cpu_measured"))
    project.run("--gpu-fleet=slurm", "--gpu-json=report.json").assert_outcomes(passed=3)
    assert {(order.task.scale, order.gpus, order.conditions.platform) for order in engine.orders} == {("tiny", 0, "cpu")}
    assert {result["device"] for result in project.report()["results"]} == {"cpu"}


def test_what_is_lost_fails_its_test_and_no_other(project: Project, engine: AtOnce) -> None:
    engine.refused = {GEMMA}
    result = project.run(*FLEET, "--gpu-json=report.json", "--gpu-history=history.jsonl")
    result.assert_outcomes(passed=2, failed=1)
    sentence = only_sentence(result, f"test_tuning[{GEMMA}]")
    assert sentence == (f"{GEMMA} was lost by the fleet, which says nothing of the case: no such partition; ask otherwise")
    (lost,) = [one for one in project.report()["results"] if one["key"] == GEMMA]
    assert [(reply["outcome"], reply["cause"]) for reply in lost["replies"]] == [("lost", "not_scheduled")]
    assert lost["verdict"]["status"] == "failed"
    lines = [json.loads(line) for line in (project.path / "history.jsonl").read_text().splitlines()]
    assert {line["key"]: line["outcome"] for line in lines} == {LLAMA: "measured", GEMMA: "lost", LLAMA_2: "measured"}
    result.stdout.re_match_lines([r"Gemma 7B .* lost .*failed"])


def test_what_is_lost_becomes_no_baseline(project: Project, engine: AtOnce) -> None:
    engine.refused = {GEMMA}
    project.run(*FLEET, "--gpu-baseline-update", "--gpu-runs=1")
    assert sorted(project.baselines("tuning", H100_FOLDER)) == sorted([LLAMA, LLAMA_2])


def test_runs_of_different_devices_are_not_judged_together(project: Project, engine: AtOnce) -> None:
    engine.nodes = [("NVIDIA A100-SXM4-40GB", 8), ("NVIDIA A100-SXM4-80GB", 8)]
    result = project.run("-m", "a100", "--gpu-fleet=slurm", "-k", "gemma", "--gpu-runs=2")
    sentence = only_sentence(result, f"test_tuning[{GEMMA}]")
    assert "ran on nvidia-a100-sxm4-40gb (" in sentence
    assert "and on nvidia-a100-sxm4-80gb (" in sentence
    assert "--gpu-fleet-args" in sentence


@pytest.mark.parametrize(
    ("node", "says"),
    [(("NVIDIA A100-SXM4-80GB", 8), "the GPU here is a100"), ((H100, 1), "takes 2 GPUs of a node, and it sees 1")],
)
def test_a_node_that_is_not_what_was_asked_for_loses_the_case(
    project: Project, engine: AtOnce, node: tuple[str, int], says: str
) -> None:
    engine.nodes = [node]
    project.write(
        test_tuning="""
        from pytest_gputrain import Case

        def test_wide(gputrain):
            gputrain.check(Case(model="gemma-7b", parallel="ddp", gpus=2, sequence_length=8192))
        """
    )
    sentence = only_sentence(project.run("--gpu-platform=h100", "--gpu-fleet=slurm"), "test_wide")
    assert "was lost by the fleet" in sentence
    assert says in sentence


def test_what_a_node_refuses_is_told_with_its_name(project: Project, engine: AtOnce) -> None:
    project.occupied(free_bytes=2**30, processes=1)
    sentence = only_sentence(project.run(*FLEET, "-k", "gemma", "--gpu-foreign=error"), f"test_tuning[{GEMMA}]")
    assert "is there already" in sentence
    assert "(on " in sentence


def test_what_runs_in_the_pytest_process_is_refused(project: Project, engine: AtOnce) -> None:
    project.write(
        test_tuning="""
        def test_inline(gputrain):
            gputrain.check(lambda setup: None, inline=True)

        def test_lent(gpu):
            raise AssertionError
        """
    )
    result = project.run("--gpu-platform=h100", "--gpu-fleet=slurm")
    assert "deselect its test" in only_sentence(result, "test_inline")
    assert list(skips(result)) == ["test_lent"]


@pytest.mark.parametrize(
    "other", ["--gpu-dry-run", "--gpu-isolation=inline", "--gpu-ids=0", "--gpu-rendezvous=node1"], ids=lambda flag: flag[6:]
)
def test_what_contradicts_a_fleet_is_refused(project: Project, engine: AtOnce, other: str) -> None:
    assert_refused(project, f"--gpu-fleet and {other.partition('=')[0]}* contradict each other: *", *FLEET, other)


def test_a_fleet_is_of_one_platform(project: Project, engine: AtOnce) -> None:
    assert_refused(
        project,
        "--gpu-fleet asks for machines of one platform, and -m names h100, a100; name one of them",
        "-m",
        "h100 or a100",
        *FLEET[2:],
    )


def test_arguments_for_an_unknown_platform_are_refused(project: Project, engine: AtOnce) -> None:
    project.ini("gpu_fleet_args = h1000: --partition=gpu")
    assert_refused(project, "--gpu-fleet-args: 'h1000' is unknown (did you mean 'h100'?); known: *", *FLEET)


def test_a_scheduler_that_is_not_here_is_told_at_once(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.machine(None)
    monkeypatch.setenv("PATH", "")
    assert_refused(project, "--gpu-fleet=slurm: sbatch, squeue, scancel not found on PATH; *", "--gpu-fleet=slurm")


def test_nothing_of_a_fleet_is_imported_without_the_option(project: Project) -> None:
    project.write(
        test_modules="""
        import sys

        def test_modules(gputrain):
            assert [name for name in sys.modules if name.startswith("pytest_gputrain.fleet")] == []
        """
    )
    project.spawn().assert_outcomes(passed=1)
