"""Recomputation, and torch's older variant of it: the same training as without, with a block's forward pass anew."""

import pytest
from test_prediction import compare
from zoo_examples import METHODS_OF_MODELS, example, measured

from pytest_gputrain.cases.architectures.facts import architectures

RECOMPUTING = [(model, method) for model, method in METHODS_OF_MODELS if architectures()[model].blocks]
# The quickest of each family.
SOME = [
    ("phi-3-mini-128k", "full"),
    ("pangu-350m", "full"),
    ("llama-3.1-8b", "lora"),
    ("llama-3.1-8b", "qlora"),
    ("bert-large", "full"),
    ("transformer-big", "full"),
    ("flux.1-dev", "lora"),
    ("hunyuan-video", "full"),
    ("mochi-1", "lora"),
    ("wan2.1-i2v", "full"),
    ("qwen2-vl-2b", "sft"),
    ("llava-1.6-7b", "pretrain"),
]


def both(model, method, **knobs):
    fields = {"precision": "fp32", "activation_checkpointing": True, "steps": 2, "warmup": 1, "learning_rate": 1e-3, **knobs}
    newer = example(model, method, **fields)
    return newer, newer.replace(reentrant_checkpointing=True)


@pytest.mark.parametrize(
    ("model", "method"),
    [pytest.param(*pair, marks=[] if pair in SOME else [pytest.mark.slow]) for pair in RECOMPUTING],
)
def test_it_trains_the_same(model, method):
    newer, older = both(model, method)
    plain, newer, older = (measured(case) for case in (newer.replace(activation_checkpointing=False), newer, older))
    # The forward peak of a tiny SD3 is of its encoders, which nothing recomputes.
    phase = "backward" if model == "sd3" else "forward"
    for recomputing in (newer, older):
        assert recomputing.losses == pytest.approx(plain.losses, rel=1e-6)
        assert recomputing.trainable_parameters == plain.trainable_parameters
        # In front of frozen blocks transformers' own switch and the older one want a gradient that nobody needs.
        assert recomputing.flops_per_step == pytest.approx(plain.flops_per_step, rel=0.05 if "lora" in method else 0)
        assert recomputing.phase_peak_bytes[phase] < plain.phase_peak_bytes[phase]
    assert plain.recomputed_flops_per_step == 0
    # The newer one stops where all that backward wants is there: before the last product of a block, unless dropout follows.
    assert older.recomputed_flops_per_step >= newer.recomputed_flops_per_step > 0
    if (model, method) == ("phi-3-mini-128k", "full"):
        assert older.recomputed_flops_per_step > newer.recomputed_flops_per_step
        assert older.peak_allocated_bytes != newer.peak_allocated_bytes


def test_every_model_with_blocks_is_among_the_quick_ones_by_its_family():
    families = {architectures()[model].family for model, _ in RECOMPUTING}
    assert {architectures()[model].family for model, _ in SOME} == families
    assert set(SOME) <= set(RECOMPUTING)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning:torch")  # FLUX's, under autocast
@pytest.mark.parametrize(("model", "method"), [*SOME, ("sd-1.5", "lora")])
def test_a_prediction_is_what_a_worker_counts(model, method):
    compare(both(model, method, precision="bf16-amp" if method == "lora" else "bf16")[1])
