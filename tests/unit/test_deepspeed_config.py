"""A file of further options of DeepSpeed: what it may set, what it must not, and what tells it from another."""

import json

import pytest

from pytest_gputrain import Case
from pytest_gputrain.cases.deepspeed_config import merge, with_config
from pytest_gputrain.cases.model_config import with_model
from pytest_gputrain.utils.errors import BadCase

FILE = "ds/options.json"
CASE = Case(
    model="pangu-350m",
    parallel="zero2",
    gpus=2,
    batch_size=4,
    gradient_accumulation=8,
    sequence_length=512,
    offload_optimizer=True,
    pin_memory=True,
    deepspeed_config=FILE,
)


def further(root, content, case=CASE):
    return read(root, content, case)[1]


def read(root, content, case=CASE):
    (root / "ds").mkdir(exist_ok=True)
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (root / FILE).write_bytes(text)
    return with_config(case, root)


AGREEING = {
    "train_batch_size": 64,
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 0.0,
    "bf16": {"enabled": True},
    "fp16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none", "pin_memory": True},
    },
}
"""What the case decides too."""


def test_what_agrees_with_the_case_adds_nothing(tmp_path):
    case, options = read(tmp_path, AGREEING)
    empty, _ = read(tmp_path, {})
    assert options == {}
    assert case.deepspeed_config == empty.deepspeed_config


def test_a_file_for_transformers_is_taken(tmp_path):
    """The one of sunzeyeah/RLHF for stage 2."""
    scaling = {"auto_cast": False, "loss_scale": 0, "initial_scale_power": 32, "hysteresis": 2, "min_loss_scale": 1}
    zero = {
        "allgather_partitions": True,
        "reduce_scatter": True,
        "contiguous_gradients": True,
        "round_robin_gradients": True,
    }
    content = {
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": 100,
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "overlap_comm": False,
            "allgather_bucket_size": 5e8,
            "reduce_bucket_size": 5e8,
            **zero,
        },
        "fp16": {"enabled": "auto", **scaling},
        "bf16": {"enabled": "auto"},
        "optimizer": {"type": "Adam", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    }
    case = CASE.replace(overlap_comm=False, allgather_bucket_size=500_000_000, reduce_bucket_size=500_000_000)
    assert further(tmp_path, content, case) == {"steps_per_print": 100, "zero_optimization": zero, "fp16": scaling}
    for changed in (case.replace(optimizer="sgd"), case.replace(reduce_bucket_size=1)):
        with pytest.raises(BadCase, match=r"the section 'optimizer'|reduce_bucket_size=500000000.0, which contradicts"):
            read(tmp_path, content, changed)


PANGU_HIDDEN = 1024
SIZES = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
COMMON = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "min_loss_scale": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
}
"""What the files for stage 2 and 3 of LLaMA-Factory, axolotl and transformers have in common."""
PASSED_ON = {"zero_allow_untested_optimizer": True, "fp16": {"loss_scale": 0, "loss_scale_window": 1000}}
AUTO = dict.fromkeys(SIZES, "auto")


def test_auto_is_what_transformers_and_deepspeed_make_of_it(tmp_path):
    """As trainer_config_finalize of transformers.integrations.deepspeed does; DeepSpeedConfigModel drops the others."""
    case = CASE.replace(parallel="zero3", offload_optimizer=False, pin_memory=False)
    zero = {"stage": 3, "sub_group_size": 1e9, "stage3_max_live_parameters": "auto", "overlap_comm": "auto", **AUTO}
    square = PANGU_HIDDEN * PANGU_HIDDEN
    filled = dict(zip(SIZES, (square, int(0.9 * square), 10 * PANGU_HIDDEN), strict=True))
    assert further(tmp_path, COMMON | {"zero_optimization": zero}, case) == {
        **PASSED_ON,
        "zero_optimization": {"sub_group_size": 1e9, **filled},
    }
    # What the case sets counts before what transformers fills in.
    given = further(tmp_path, COMMON | {"zero_optimization": zero}, case.replace(reduce_bucket_size=7))
    assert "reduce_bucket_size" not in given["zero_optimization"]
    # transformers leaves the sizes of stage 3 alone in other stages.
    stage2 = {"zero_optimization": {"stage": 2, **AUTO}}
    assert further(tmp_path, stage2) == {"zero_optimization": {"reduce_bucket_size": square}}


@pytest.mark.parametrize(
    ("model", "hidden"), [("transformer-big", 1024), ("resnet-50", 2048), ("gemma-3-4b", 2560), ("llama-3.1-8b", 4096)]
)
def test_the_hidden_size_is_found_as_transformers_finds_it(tmp_path, model, hidden):
    case = CASE.replace(model=model)
    options = further(tmp_path, {"zero_optimization": {"reduce_bucket_size": "auto"}}, case)
    assert options == {"zero_optimization": {"reduce_bucket_size": hidden * hidden}}


@pytest.mark.parametrize("keys", [(), ("llm_config",), ("thinker_config", "text_config")])
def test_the_hidden_size_is_that_of_the_language_model_wherever_a_config_has_it(tmp_path, keys):
    config = {"hidden_size": 96, "num_hidden_layers": 2}
    for key in reversed(keys):
        config = {key: config}
    (tmp_path / "model.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
    case = with_model(CASE.replace(model="./model.json", sequence_length=8), tmp_path)
    options = further(tmp_path, {"zero_optimization": {"reduce_bucket_size": "auto"}}, case)
    assert options == {"zero_optimization": {"reduce_bucket_size": 96 * 96}}


def test_another_content_is_another_case_and_another_order_is_not(tmp_path):
    first, options = read(tmp_path, {"steps_per_print": 1, "prescale_gradients": True})
    assert with_config(first, tmp_path) == (first, options), "a case with a digest is read anew"
    same, _ = read(tmp_path, b' {"prescale_gradients": true,\n "steps_per_print": 1}')
    other, _ = read(tmp_path, {"steps_per_print": 1, "prescale_gradients": False})
    assert first.identity() == same.identity()
    assert first.identity() != other.identity()
    assert first.deepspeed_config.startswith(f"{FILE}#")
    named = first.replace(named=("deepspeed_config",))
    assert str(named) == f"pangu-350m-full-bf16-zero2-deepspeed_config={first.deepspeed_config}"


CONTRADICTING = [
    b"{",
    [1],
    {"train_batch_size": 32},
    {"train_micro_batch_size_per_gpu": 1},
    {"gradient_clipping": 1.0},
    {"fp16": {"enabled": True}},
    {"zero_optimization": {"stage": 3}},
    {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
    {"zero_optimization": {"offload_param": {"device": "cpu"}}},
    {"zero_optimization": {"offload_optimizer": None}},
    {"zero_optimization": True},
    {"steps_per_print": "auto"},
    {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": "auto"}}},
    {"scheduler": {"type": "WarmupLR"}},
    {"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}},
    {"activation_checkpointing": {"cpu_checkpointing": True}},
]
NO_FILES = ("none.json", "..", "/etc/hosts", "a/../../b.json", "ds")


def test_what_contradicts_and_what_is_no_file_is_told(tmp_path, snapshot):
    said = {}

    def refuse(what, read_it):
        with pytest.raises(BadCase) as refused:
            read_it()
        (sentence,) = str(refused.value).splitlines()
        said[what] = sentence.replace(str(tmp_path), "...")

    for content in CONTRADICTING:
        refuse(str(content), lambda content=content: read(tmp_path, content))
    without = CASE.replace(model="sd-1.5")
    refuse("no hidden size", lambda: read(tmp_path, {"zero_optimization": {"reduce_bucket_size": "auto"}}, without))
    for name in NO_FILES:
        refuse(name, lambda name=name: with_config(CASE.replace(deepspeed_config=name), tmp_path))
    assert said == snapshot


def test_knobs_that_are_set_count_before_the_file(tmp_path):
    content = {"zero_optimization": {"reduce_bucket_size": 1000, "overlap_comm": True}}
    assert further(tmp_path, content) == content
    assert further(tmp_path, content, CASE.replace(reduce_bucket_size=1000, overlap_comm=True)) == {}
    for knob in ({"reduce_bucket_size": 2000}, {"overlap_comm": False}):
        with pytest.raises(BadCase, match=f"which contradicts the case, whose {next(iter(knob))} makes it"):
            read(tmp_path, content, CASE.replace(**knob))


def test_options_replace_those_of_the_same_section():
    options = {"a": 1, "zero": {"stage": 2, "x": 1}}
    merge(options, {"a": 2, "zero": {"x": 3, "y": {"z": 4}}, "b": {"c": 5}})
    assert options == {"a": 2, "zero": {"stage": 2, "x": 3, "y": {"z": 4}}, "b": {"c": 5}}
