"""Tests ``-m`` and ``--gpu-platform``: which tests run on which machine, at which scale, and in how many processes."""

from fnmatch import fnmatchcase

import pytest
from plugin_project import H100, H100_FOLDER, SUITE, skips

DECLARED = SUITE.replace('method=["lora"]', 'method=["lora"], platforms=["h100", "h200"]')
FOR_A100 = SUITE.replace('method=["lora"]', 'method=["lora"], platforms=["a100"]')
_FSDP = """
import pytest
from pytest_gputrain import Case

CASE = Case(model="gemma-7b", method="full", sequence_length=64, parallel="fsdp", gpus=2, platforms=("h100",))


@pytest.mark.parametrize("case", [CASE], ids=str)
def test_sharded(gputrain, case):
    gputrain.check(case)
"""
FSDP, FSDP_6, FSDP_8 = (_FSDP.replace("gpus=2", f"gpus={gpus}") for gpus in (2, 6, 8))
FP16 = FSDP.replace('parallel="fsdp"', 'parallel="zero2", precision="fp16-amp"')
SERVED = """
from pytest_gputrain import Case


def test_served(gputrain):
    gputrain.check(Case(model="word2vec", precision="fp32", optimizer="sgd", parallel="ps", gpus=8, servers=4))
"""
SERVED_ONE = SERVED.replace("gpus=8, servers=4", "gpus=1, servers=1")
OWN = """
import pytest


def build(setup):
    return lambda: None


@pytest.mark.h100
def test_own(gputrain):
    gputrain.check(build)
"""
LENT = "def test_lent(gpu):\n    assert gpu.name == 'NVIDIA H100 80GB HBM3'\n"
CPU, UNKNOWN = None, "NVIDIA Z999 1TB"
ON_CPU, ON_GPU = {"scale": "tiny", "gpus": 0}, {"scale": "full", "gpus": 1}


def _of(nodes, processes, gpus, servers=0):
    return {"nodes": nodes, "processes": processes, "gpus": gpus, "servers": servers}


@pytest.mark.parametrize(
    ("device", "gpus", "suite", "arguments", "expected"),
    [
        # -m on a machine without a GPU
        (CPU, 0, DECLARED, "", ON_CPU),
        (CPU, 0, DECLARED, "-m h100_or_cpu", ON_CPU),
        (CPU, 0, DECLARED, "-m cpu_and_not_slow", ON_CPU),
        (CPU, 0, SUITE, "-m h100", "needs h100 x1, found cpu"),
        (CPU, 0, DECLARED, "-m (h100_or_h200)_and_not_slow", "needs h200 x1 or h100 x1, found cpu"),
        (CPU, 0, DECLARED, "-m a100", "deselected"),
        (CPU, 0, SUITE, "--gpu-scale=full", {"scale": "full", "gpus": 0}),
        (CPU, 0, OWN, "--strict-markers --strict-config", "needs h100 x1, found cpu"),
        (CPU, 0, LENT, "", "needs a GPU, found cpu"),
        # on a GPU
        (H100, 1, DECLARED, "-m h100", ON_GPU),
        (H100, 3, DECLARED, "--gpu-ids=2", ON_GPU),
        (H100, 1, OWN, "-m h100", ON_GPU),
        (H100, 1, LENT, "", {}),
        (H100, 1, DECLARED, "-m cpu", "needs cpu, found h100"),
        (H100, 1, DECLARED, "-m cpu --gpu-platform=cpu", ON_CPU),
        (H100, 1, FOR_A100, "", "needs a100 x1, found h100"),
        (UNKNOWN, 1, SUITE, "", ON_GPU),
        (UNKNOWN, 1, DECLARED, "", "needs h200 x1 or h100 x1, found unknown"),
        (UNKNOWN, 1, DECLARED, "-m h100 --gpu-platform=h100", ON_GPU),
        # several GPUs and nodes
        (H100, 2, FSDP, "-m h100", _of(1, 2, 2)),
        (H100, 1, FSDP, "-m h100", "needs 2 GPUs, found 1; -o gpu_nodes=2 takes those of 2 nodes"),
        (H100, 4, FSDP_8, "-m h100 -o gpu_nodes=2", _of(2, 8, 4)),
        (H100, 4, FSDP_6, "-m h100 -o gpu_nodes=2", "needs 6 GPUs, found 4; a case takes whole nodes, so *"),
        (H100, 8, SERVED, "", _of(1, 8, 8, servers=4)),
        # several processes on a CPU
        (CPU, 0, FSDP, "-m h100", "needs h100 x2, found cpu"),
        (CPU, 0, FSDP_8, "", _of(1, 2, 0)),
        (CPU, 0, FSDP_8, "-o gpu_processes=16", _of(1, 8, 0)),
        (CPU, 0, FSDP_8, "-o gpu_nodes=3 -o gpu_processes=2", _of(2, 2, 0)),
        (CPU, 0, FSDP, "-o gpu_processes=1", "needs 2 processes; -o gpu_processes=2 runs two of them on a CPU"),
        (CPU, 0, FP16, "-o gpu_processes=2", "needs a GPU: DeepSpeed's fp16 refuses a CPU"),
        (CPU, 0, SERVED, "-o gpu_processes=3", _of(1, 3, 0, servers=3)),
        (CPU, 0, SERVED, "-o gpu_processes=1", "needs 12 processes; -o gpu_processes=2 runs two workers and two servers *"),
        (CPU, 0, SERVED_ONE, "-o gpu_processes=1", "needs 2 processes; -o gpu_processes=2 runs two workers and *"),
    ],
)
def test_a_machine_runs_what_it_has_and_skips_the_rest_with_the_reason(
    project, monkeypatch, device, gpus, suite, arguments, expected
):
    if device:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    project.machine(device, gpus=gpus)
    project.ini("markers = slow: not here")
    project.write(test_chosen=suite)
    result = project.run(
        *(word.replace("_and_", " and ").replace("_or_", " or ").replace("not_", "not ") for word in arguments.split())
    )
    if isinstance(expected, dict):
        assert {"passed"} == result.parseoutcomes().keys()
        seen = [{**launched, "gpus": len(launched["gpus"])} for launched in project.launches]
        assert [{name: launched[name] for name in expected} for launched in seen] == [expected] * len(seen)
        assert (seen == []) == (suite == LENT)
    else:
        assert project.launches == []
        outcome = "deselected" if expected == "deselected" else "skipped"
        assert result.parseoutcomes().keys() == {outcome}
        assert all(fnmatchcase(reason, expected) for reason in skips(result).values())
        assert result.ret == (pytest.ExitCode.OK if outcome == "skipped" else pytest.ExitCode.NO_TESTS_COLLECTED)


def test_the_device_is_that_of_the_results_and_the_scale_is_in_the_keys(h100):
    for device, platform, folder in (
        (H100, "h100", H100_FOLDER),
        (UNKNOWN, "unknown", "nvidia-z999-1tb"),
        (CPU, "cpu", "cpu"),
    ):
        h100.machine(device)
        h100.write(test_tuning=SUITE)
        h100.write(test_scale=f"def test_scale(gputrain):\n    assert gputrain.scale == {'full' if device else 'tiny'!r}\n")
        h100.run("--gpu-json=report.json").assert_outcomes(passed=4)
        assert {(result["platform"], result["device"]) for result in h100.report()["results"]} == {(platform, folder)}
        assert {key.endswith("@tiny") for key in h100.verdicts()} == {device is CPU}


def test_a_case_asked_for_in_a_test_keeps_to_its_platforms_and_shares_the_gpu_with_the_fixture(h100):
    h100.write(
        test_mine="""
        def build(setup):
            return lambda: None

        def test_here(gputrain, gpu):
            gputrain.measure(build, platforms=("h100",))

        def test_elsewhere(gputrain):
            gputrain.measure(build, model="other", platforms=("a100",))
        """
    )
    result = h100.run("-rs")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*needs a100 x1, found h100*"])
