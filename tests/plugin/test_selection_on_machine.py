"""Tests ``-m`` and ``--gpu-platform``: which tests run on which machine."""

from __future__ import annotations

import pytest
from plugin_project import ANY, GEMMA, H100, H100_FOLDER, LLAMA, SUITE, Project, only_sentence, recorded, skips

DECLARED = SUITE.replace('method=["lora"]', 'method=["lora"], platforms=["h100", "h200"]')
FSDP = """
import pytest
from pytest_gputrain import Case

CASE = Case(model="gemma-7b", method="full", sequence_length=64, parallel="fsdp", gpus=2, platforms=("h100",))


@pytest.mark.parametrize("case", [CASE], ids=str)
def test_sharded(gputrain, case):
    gputrain.check(case)
"""
SERVED = """
from pytest_gputrain import Case


def test_served(gputrain):
    gputrain.check(Case(model="word2vec", precision="fp32", optimizer="sgd", parallel="ps", gpus=8, servers=4))
"""
OWN = """
import pytest


def build(setup):
    return lambda: None


@pytest.mark.h100
def test_own(gputrain):
    gputrain.check(build)
"""


@pytest.fixture
def cpu(project: Project) -> Project:
    """A machine without a GPU, whose replies are recorded."""
    project.machine(None)
    return project


def test_h100_selected_on_a_cpu_skips_with_the_reason(cpu: Project) -> None:
    cpu.write(test_tuning=DECLARED)
    result = cpu.run("-m", "h100", "-rs")
    result.assert_outcomes(skipped=3)
    assert set(skips(result).values()) == {"needs h100 x1, found cpu"}
    result.stdout.fnmatch_lines(["SKIPPED*needs h100 x1, found cpu"])
    assert cpu.launches == []


def test_h100_selected_on_a_cpu_skips_cases_declared_for_any_platform(cpu: Project) -> None:
    cpu.write(test_tuning=SUITE)
    result = cpu.run("-m", "h100")
    result.assert_outcomes(skipped=3)
    assert set(skips(result).values()) == {"needs h100 x1, found cpu"}


@pytest.mark.slow
@pytest.mark.parametrize("expression", ["h100 or cpu", "cpu", "not a100", "cpu and not slow"])
def test_expressions_that_hold_for_a_cpu_run_there(cpu: Project, expression: str) -> None:
    cpu.write(test_tuning=DECLARED)
    cpu.ini("markers = slow: not here")
    cpu.run("-m", expression).assert_outcomes(passed=3)
    assert {launched["scale"] for launched in cpu.launches} == {"tiny"}


@pytest.mark.parametrize("expression", ["h100 and h200", "h100 or h200", "(h100 or h200) and not slow"])
def test_expressions_that_do_not_hold_for_a_cpu_never_run_there(cpu: Project, expression: str) -> None:
    cpu.write(test_tuning=DECLARED)
    cpu.ini("markers = slow: not here")
    cpu.run("-m", expression).assert_outcomes(skipped=3)


def test_either_gpu_named_is_told_as_needed(cpu: Project) -> None:
    cpu.write(test_tuning=DECLARED)
    assert set(skips(cpu.run("-m", "h100 or h200")).values()) == {"needs h200 x1 or h100 x1, found cpu"}


def test_a_platform_that_no_case_is_declared_for_deselects(cpu: Project) -> None:
    cpu.write(test_tuning=DECLARED)
    result = cpu.run("-m", "a100")
    result.assert_outcomes(deselected=3)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_without_an_expression_declared_cases_run_tiny_on_a_cpu(cpu: Project) -> None:
    cpu.write(test_tuning=DECLARED)
    cpu.run("--gpu-json=report.json").assert_outcomes(passed=3)
    assert set(cpu.verdicts()) == {f"{launched['id']}@tiny" for launched in cpu.launches}


def test_h100_selected_on_an_h100_runs_at_full_scale_with_the_gpu(h100: Project) -> None:
    h100.write(test_tuning=DECLARED)
    h100.run("-m", "h100", "--gpu-json=report.json").assert_outcomes(passed=3)
    assert {(launched["scale"], len(launched["gpus"])) for launched in h100.launches} == {("full", 1)}
    assert set(h100.verdicts()) == {launched["id"] for launched in h100.launches}
    assert {(result["platform"], result["device"]) for result in h100.report()["results"]} == {("h100", H100_FOLDER)}


def test_cpu_selected_on_an_h100_skips(h100: Project) -> None:
    h100.write(test_tuning=DECLARED)
    result = h100.run("-m", "cpu")
    result.assert_outcomes(skipped=3)
    assert set(skips(result).values()) == {"needs cpu, found h100"}


def test_platform_cpu_leaves_the_gpu_alone(h100: Project) -> None:
    h100.write(test_tuning=DECLARED)
    h100.run("-m", "cpu", "--gpu-platform=cpu").assert_outcomes(passed=3)
    assert {(launched["scale"], len(launched["gpus"])) for launched in h100.launches} == {("tiny", 0)}


@pytest.mark.parametrize("arguments", [(), ("-m", "a100")])
def test_a_case_for_another_gpu_only_skips_on_an_h100(h100: Project, arguments: tuple[str, ...]) -> None:
    h100.write(test_tuning=SUITE.replace('method=["lora"]', 'method=["lora"], platforms=["a100"]'))
    result = h100.run(*arguments)
    result.assert_outcomes(skipped=3)
    assert set(skips(result).values()) == {"needs a100 x1, found h100"}
    assert h100.launches == []


def test_a_case_of_two_gpus_skips_with_its_reason_on_one(h100: Project) -> None:
    h100.write(test_sharded=FSDP)
    result = h100.run("-m", "h100")
    result.assert_outcomes(skipped=1)
    assert list(skips(result).values()) == ["needs 2 GPUs, found 1; -o gpu_nodes=2 takes those of 2 nodes"]


def test_a_case_of_several_nodes_takes_all_gpus_of_each(h100: Project) -> None:
    h100.machine(H100, gpus=4)
    h100.write(test_sharded=FSDP.replace("gpus=2", "gpus=8"))
    h100.run("-m", "h100", "-o", "gpu_nodes=2").assert_outcomes(passed=1)
    (launched,) = h100.launches
    assert (launched["nodes"], launched["processes"], len(launched["gpus"])) == (2, 8, 4)


def test_a_case_that_would_take_part_of_a_node_skips(h100: Project) -> None:
    h100.machine(H100, gpus=4)
    h100.write(test_sharded=FSDP.replace("gpus=2", "gpus=6"))
    (reason,) = skips(h100.run("-m", "h100", "-o", "gpu_nodes=2")).values()
    assert reason.startswith("needs 6 GPUs, found 4; several nodes are taken whole")


def test_a_case_that_fits_stays_on_this_node(h100: Project) -> None:
    h100.machine(H100, gpus=4)
    h100.write(test_sharded=FSDP)
    h100.run("-m", "h100", "-o", "gpu_nodes=2").assert_outcomes(passed=1)
    (launched,) = h100.launches
    assert (launched["nodes"], len(launched["gpus"])) == (1, 2)


def test_on_a_cpu_the_processes_are_spread(cpu: Project) -> None:
    cpu.write(test_sharded=FSDP.replace("gpus=2", "gpus=8"))
    cpu.run("-o", "gpu_nodes=3", "-o", "gpu_processes=2").assert_outcomes(passed=1)
    (launched,) = cpu.launches
    assert (launched["nodes"], launched["processes"]) == (2, 2)


def test_a_sharded_case_gets_its_gpus_and_a_process_on_each(h100: Project) -> None:
    h100.machine(H100, gpus=2)
    h100.write(test_sharded=FSDP)
    h100.run("-m", "h100").assert_outcomes(passed=1)
    (launched,) = h100.launches
    assert (launched["processes"], len(launched["gpus"])) == (2, 2)


def test_servers_run_beside_the_workers_on_a_cpu(cpu: Project) -> None:
    cpu.write(test_served=SERVED)
    assert list(skips(cpu.run("-o", "gpu_processes=1")).values()) == [
        "needs 12 processes; -o gpu_processes=2 runs two workers and two servers at most on a CPU"
    ]
    cpu.run("-o", "gpu_processes=3").assert_outcomes(passed=1)
    (launched,) = cpu.launches
    assert (launched["processes"], launched["servers"]) == (3, 3)


def test_one_worker_and_one_server_are_two_processes(cpu: Project) -> None:
    cpu.write(test_served=SERVED.replace("gpus=8, servers=4", "gpus=1, servers=1"))
    assert list(skips(cpu.run("-o", "gpu_processes=1")).values()) == [
        "needs 2 processes; -o gpu_processes=2 runs two workers and two servers at most on a CPU"
    ]


def test_servers_take_no_gpus(h100: Project) -> None:
    h100.machine(H100, gpus=8)
    h100.write(test_served=SERVED)
    h100.run().assert_outcomes(passed=1)
    (launched,) = h100.launches
    assert (launched["processes"], launched["servers"], len(launched["gpus"])) == (8, 4, 8)


def test_a_case_of_eight_gpus_runs_as_two_processes_on_a_cpu_or_as_the_option_says(cpu: Project) -> None:
    cpu.write(test_sharded=FSDP.replace("gpus=2", "gpus=8"))
    cpu.run().assert_outcomes(passed=1)
    cpu.run("-o", "gpu_processes=4").assert_outcomes(passed=1)
    cpu.run("-o", "gpu_processes=16").assert_outcomes(passed=1)
    assert [launched["processes"] for launched in cpu.launches] == [2, 4, 8]


def test_a_case_of_several_gpus_skips_on_a_cpu_that_is_to_run_one_process(cpu: Project) -> None:
    cpu.write(test_sharded=FSDP)
    result = cpu.run("-o", "gpu_processes=1")
    assert list(skips(result).values()) == ["needs 2 processes; -o gpu_processes=2 runs two of them on a CPU"]
    assert cpu.launches == []


def test_deepspeed_s_fp16_skips_on_a_cpu(cpu: Project) -> None:
    cpu.write(test_sharded=FSDP.replace('parallel="fsdp"', 'parallel="zero2", precision="fp16-amp"'))
    assert list(skips(cpu.run("-o", "gpu_processes=2")).values()) == ["needs a GPU: DeepSpeed's fp16 refuses a CPU"]


def test_a_case_of_two_gpus_tells_how_many_it_needs_elsewhere(cpu: Project) -> None:
    cpu.write(test_sharded=FSDP)
    assert list(skips(cpu.run("-m", "h100")).values()) == ["needs h100 x2, found cpu"]


def test_an_unknown_gpu_runs_cases_declared_for_any(h100: Project) -> None:
    h100.machine("NVIDIA Z999 1TB")
    h100.write(test_tuning=SUITE)
    h100.run("--gpu-json=report.json").assert_outcomes(passed=3)
    assert {(result["platform"], result["device"]) for result in h100.report()["results"]} == {
        ("unknown", "nvidia-z999-1tb")
    }


def test_an_unknown_gpu_skips_declared_cases(h100: Project) -> None:
    h100.machine("NVIDIA Z999 1TB")
    h100.write(test_tuning=DECLARED)
    result = h100.run()
    result.assert_outcomes(skipped=3)
    assert set(skips(result).values()) == {"needs h200 x1 or h100 x1, found unknown"}


def test_a_platform_given_lets_an_unknown_gpu_pass_for_it(h100: Project) -> None:
    h100.machine("NVIDIA Z999 1TB")
    h100.write(test_tuning=DECLARED)
    h100.run("-m", "h100", "--gpu-platform=h100").assert_outcomes(passed=3)


def test_a_platform_without_a_gpu_fails_in_one_sentence(cpu: Project) -> None:
    cpu.write(test_tuning=DECLARED)
    result = cpu.run("-m", "h100", "--gpu-platform=h100", "-k", "gemma")
    assert only_sentence(result, f"test_tuning[{GEMMA}]") == "--gpu-platform=h100, but no GPU is visible here"


def test_gpus_hidden_by_the_environment_do_not_count(h100: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    h100.write(test_tuning=DECLARED)
    h100.run("-m", "h100").assert_outcomes(skipped=3)


def test_ids_choose_the_gpu(h100: Project) -> None:
    h100.machine(H100, gpus=3)
    h100.write(test_tuning=DECLARED)
    h100.run("--gpu-ids=2").assert_outcomes(passed=3)
    used = {uuid for launched in h100.launches for uuid in launched["gpus"]}
    assert len(used) == 1
    h100.run(f"--gpu-ids={used.pop()}").assert_outcomes(passed=3)


def test_own_code_marked_for_a_gpu_skips_elsewhere_even_without_an_expression(cpu: Project) -> None:
    cpu.write(test_own=OWN)
    result = cpu.run()
    result.assert_outcomes(skipped=1)
    assert list(skips(result).values()) == ["needs h100 x1, found cpu"]


def test_own_code_marked_for_a_gpu_runs_there(h100: Project) -> None:
    h100.write(test_own=OWN)
    h100.run("-m", "h100").assert_outcomes(passed=1)


def test_scale_tiny_on_a_gpu_is_a_baseline_of_its_own(h100: Project) -> None:
    h100.write(test_tuning=SUITE)
    h100.run("--gpu-baseline-update").assert_outcomes(passed=3)
    h100.run("--gpu-baseline-update", "--gpu-scale=tiny", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    keys = set(h100.baselines("tuning", H100_FOLDER))
    assert {GEMMA, f"{GEMMA}@tiny", LLAMA} <= keys
    assert len(keys) == 4


def test_scale_full_on_a_cpu_asks_for_the_full_model(cpu: Project) -> None:
    cpu.write(test_tuning=SUITE)
    cpu.run("--gpu-scale=full", "-k", "gemma").assert_outcomes(passed=1, deselected=2)
    assert [launched["scale"] for launched in cpu.launches] == ["full"]


def test_strict_markers_accept_every_platform(cpu: Project) -> None:
    cpu.ini("addopts = --strict-markers --strict-config")
    cpu.write(test_own=OWN)
    cpu.run().assert_outcomes(skipped=1)


def test_the_gpu_fixture_lends_a_device(h100: Project) -> None:
    h100.write(test_lent="def test_lent(gpu):\n    assert gpu.name == 'NVIDIA H100 80GB HBM3'\n")
    h100.run().assert_outcomes(passed=1)


def test_the_gpu_fixture_skips_without_a_device(cpu: Project) -> None:
    cpu.write(test_lent="def test_lent(gpu):\n    assert False\n")
    result = cpu.run()
    result.assert_outcomes(skipped=1)
    assert list(skips(result).values()) == ["needs a GPU, found cpu"]


def test_gpus_of_two_kinds_are_refused_until_chosen(h100: Project) -> None:
    h100.machine(H100, gpus=2)
    file = h100.path / "gpus.json"
    file.write_text(file.read_text().replace(H100, "NVIDIA A100-SXM4-80GB", 1))
    h100.answer(recorded(), to=ANY)
    h100.write(test_tuning=SUITE)
    result = h100.run("-k", "gemma")
    assert only_sentence(result, f"test_tuning[{GEMMA}]") == (
        f"GPUs of several kinds are visible (NVIDIA A100-SXM4-80GB, {H100}); choose those of one with --gpu-ids"
    )
    h100.run("--gpu-ids=1").assert_outcomes(passed=3)


def test_a_case_asked_for_in_a_test_keeps_to_its_platforms(h100: Project) -> None:
    h100.write(
        test_mine="""
        def build(setup):
            return lambda: None

        def test_here(gputrain):
            gputrain.measure(build, platforms=("h100",))

        def test_elsewhere(gputrain):
            gputrain.measure(build, model="other", platforms=("a100",))
        """
    )
    result = h100.run("-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*needs a100 x1, found h100*"])


def test_the_gpu_fixture_and_a_case_share_the_gpu(h100: Project) -> None:
    h100.write(
        test_mine="""
        def build(setup):
            return lambda: None

        def test_both(gputrain, gpu):
            gputrain.measure(build)
        """
    )
    h100.run().assert_outcomes(passed=1)
