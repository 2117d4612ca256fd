"""Programs of other packages on an emulated GPU: each is the same in every run, and fails for what is planted in it."""

import functools
import importlib.util
import re
import shutil
from pathlib import Path

import pytest

pytestmark = [pytest.mark.recipes, pytest.mark.slow]

SOURCE = Path(__file__).parent / "foreign" / "programs.py"

PACKAGES = {
    "contrastive": "sentence_transformers",
    "ppo": "stable_baselines3",
    "graphs": "torch_geometric",
    "detection": "torchvision",
    "metric": "pytorch_metric_learning",
    "speech": "transformers",
    "grpo": "trl",
    "gan": "lightning",
    "images": "timm",
    "codes": "vector_quantize_pytorch",
    "volumes": "monai",
    "tagger": "torchcrf",
}
"""The package that each program needs."""

BELOW = {"ppo": "in optimizer", "gan": "in build", "images": "in forward"}
"""The phase in which `below` is planted, where it is not between the backward pass and the optimizer."""

EACH_TIME = {"detection", "gan", "images", "ppo"}
"""The programs that CI runs each time: one for each phase of `below`. The others run once a week."""

REPEATS = 3

each_program = pytest.mark.parametrize(
    "program",
    [
        pytest.param(
            program,
            marks=[
                pytest.mark.skipif(not importlib.util.find_spec(package), reason=f"{package} is not installed"),
                *([] if program in EACH_TIME else [pytest.mark.weekly]),
            ],
        )
        for program, package in PACKAGES.items()
    ],
)


@pytest.fixture(scope="session")
def results(run_tests_in, tmp_path_factory, request):
    """Train all programs at a time and return their results: first recorded, then repeated or with something planted."""
    folder = tmp_path_factory.mktemp("foreign")
    programs = {item.callspec.params["program"] for item in request.session.items if item.path == Path(__file__)}
    shutil.copy(SOURCE, folder / "test_programs.py")

    @functools.cache
    def train(planted="", repeat=0):
        options = ["--gpu-strict"] if planted or repeat else ["--gpu-baseline-update"]
        if options == ["--gpu-strict"]:
            train()
        done, found = run_tests_in(folder, "-n", "2", "-k", " or ".join(programs), *options, PLANTED=planted)
        assert found, done.stdout + done.stderr
        return found

    return lambda program, *which: train(*which)[f"test_program[{program}]"]["verdict"]


def planted(program, name):
    """Return how a sentence names the tensor that is planted in a program, and its line."""
    lines = SOURCE.read_text().splitlines()
    first = lines.index(f"def {program}(setup):")
    place = next(index for index in range(first, len(lines)) if lines[index].endswith(f"# planted {name}"))
    rows, columns = re.search(r"torch\.ones\((\d+), (\d+)", lines[place]).groups()
    return f"[{rows}, {columns}]", f"test_programs.py:{place + 1}"


@each_program
def test_a_program_is_recorded_and_passes_in_every_further_run(results, program):
    verdicts = [results(program), *(results(program, "", repeat) for repeat in range(1, REPEATS + 1))]
    assert [verdict["status"] for verdict in verdicts] == ["recorded", *["pass"] * REPEATS], verdicts


@each_program
def test_a_tensor_that_a_step_holds_fails_with_its_shape_phase_and_line(results, program):
    verdict = results(program, "tensor")
    shape, line = planted(program, "tensor")
    assert verdict["status"] == "regressed"
    assert re.search(rf"more memory: .*float32{re.escape(shape)} by \w+ in forward at {line}\b", verdict["sentence"]), (
        verdict
    )


@each_program
def test_a_tensor_that_is_kept_after_every_step_fails_with_its_line(results, program):
    verdict = results(program, "leak")
    shape, line = planted(program, "leak")
    assert verdict["status"] == "failed"
    kept = (
        rf"more of tensors after every (step|round of 2 steps), most of it (2 x )?float32 {re.escape(shape)} .* in {line};"
    )
    assert re.search(kept, verdict["sentence"]), verdict


@each_program
def test_memory_that_stays_below_the_peak_fails_with_its_phase_and_line(results, program):
    verdict = results(program, "below")
    shape, line = planted(program, "below")
    phase = BELOW.get(program, "between backward passes")
    assert verdict["status"] == "regressed"
    sentence = verdict["sentence"]
    assert re.search(rf"more {phase}, .*float32{re.escape(shape)} by \w+ {phase} at {line}\b", sentence), verdict
