"""What the counts of a case of the suite say when a library that it trains with asks the GPU for more."""

import importlib.util
from pathlib import Path

import pytest

CASE = """
from pytest_gputrain import Case

def test_case(gputrain):
    gputrain.check(Case(model="llama-3.2-1b", method="lora", sequence_length=4096, activation_checkpointing=True))
"""
MODEL = "transformers/models/llama/modeling_llama.py"
LAYER = "        hidden_states = residual + hidden_states\n        return hidden_states\n"
RETURN = "        return hidden_states\n"

CAUSES = {
    "blocking_copies": (
        LAYER.replace(RETURN, f"        hidden_states.add_(torch.ones(1).to(hidden_states.device))\n{RETURN}"),
        {"waits", "pageable"},
        f"in {MODEL} LlamaDecoderLayer.forward",
    ),
    "tensor_by_tensor": (
        f"{LAYER}\n\nadamw = torch.optim.AdamW.__init__\n"
        "torch.optim.AdamW.__init__ = lambda self, *values, **names: adamw(self, *values, **{**names, 'foreach': False})\n",
        {"work"},
        "in torch/optim/adam.py _single_tensor_adam",
    ),
    "recompiled": (
        LAYER.replace(RETURN, "        return scaled(hidden_states, next(CALLS) / 1000)\n")
        + "\n\nCALLS = iter(range(10**9))\ntorch._dynamo.config.recompile_limit = 10**6\n"
        "scaled = torch.compile(lambda values, by: values * by, dynamic=False)\n",
        {"compilations"},
        f"in {MODEL} <lambda>",
    ),
}
"""What stands for the end of a layer's forward pass, the figures that fail, and the place that is named."""


def replaced(folder, package, file, old, new):
    """Make a folder of packages with a copy of an installed one, in which a text of one file is replaced."""
    source = Path(importlib.util.find_spec(package).submodule_search_locations[0])
    at, target = source, folder / package
    for part in Path(file).parts:
        target.mkdir(parents=True)
        for entry in at.iterdir():
            if entry.name not in (part, "__pycache__"):
                (target / entry.name).symlink_to(entry)
        at, target = at / part, target / part
    text = at.read_text()
    assert text.count(old) == 1
    target.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def recorded(run_tests_in, tmp_path_factory):
    """The folder of a test whose case is recorded."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_suite.py").write_text(CASE)
    done, _ = run_tests_in(folder, "--gpu-baseline-update")
    assert done.returncode == 0, done.stdout
    return folder


# Each takes long, and the same mechanisms in own code are tested each time.
@pytest.mark.parametrize(
    "cause", [pytest.param(cause, marks=[pytest.mark.weekly] * (cause != "blocking_copies")) for cause in CAUSES]
)
def test_what_a_library_asks_for_in_addition_fails_and_is_named(recorded, run_tests_in, tmp_path, cause):
    text, figures, place = CAUSES[cause]
    packages = tmp_path / "site-packages"
    replaced(packages, "transformers", MODEL.removeprefix("transformers/"), LAYER, text)
    done, results = run_tests_in(recorded, PYTHONPATH=f"{Path(__file__).parents[2]}:{packages}")
    assert done.returncode == 1, done.stdout
    verdict = results["test_case"]["verdict"]
    assert {metric["metric"] for metric in verdict["metrics"] if metric["status"] == "regressed"} >= figures
    assert place in verdict["sentence"], verdict["sentence"]
