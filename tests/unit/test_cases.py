"""Cases: their ids, grids of them, what is wrong with one, and which of two mean the same."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from unit_examples import CASE

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.cases.grid import grid
from pytest_gputrain.cases.identity import differences, key_of
from pytest_gputrain.cases.validation import problem
from pytest_gputrain.hardware.catalog import MARKERS
from pytest_gputrain.records import Case

M = Case(model="m")
CUSTOM = Case(model="my_step", method="custom", precision="fp32", code="tests/test_mine.py::my_step")
SERVED = Case(model="word2vec", optimizer="sgd", parallel="ps", gpus=2, servers=1, asynchronous=True)
NAN = float("nan")


@pytest.mark.parametrize(
    ("case", "shown"),
    [
        (Case(model="llama-3.1-8b"), "llama-3.1-8b-full-bf16"),
        (Case(model="llama-3.1-8b", method="qlora", precision="bf16-amp"), "llama-3.1-8b-qlora-bf16-amp"),
        (Case(model="llama-3.1-8b", parallel="fsdp", gpus=8), "llama-3.1-8b-full-bf16-fsdp"),
        (M.replace(batch_size=32, platforms=("h100",)), "m-full-bf16"),
        (M.replace(batch_size=32, named=("batch_size",)), "m-full-bf16-batch_size=32"),
        (M.replace(steps=5, gpus=2, named=("steps", "gpus")), "m-full-bf16-steps=5-gpus=2"),
        (M.replace(cpu_offload=True, named=("cpu_offload",)), "m-full-bf16-cpu_offload=true"),
        (M.replace(named=("activation_checkpointing",)), "m-full-bf16-activation_checkpointing=false"),
        (CUSTOM, "my_step-fp32"),
    ],
)
def test_id_names_what_tells_cases_apart(case, shown):
    assert str(case) == shown
    assert (key_of(case, "full"), key_of(case, "tiny")) == (shown, f"{shown}@tiny")


@pytest.mark.parametrize(
    ("base", "axes", "ids"),
    [
        (M, {}, ["m-full-bf16"]),
        (M, {"model": []}, []),
        (
            M,
            {"model": ["a", "b"], "method": ["full", "lora"]},
            [f"{m}-{how}-bf16" for m in "ab" for how in ("full", "lora")],
        ),
        (M, {"batch_size": [1, 2], "cpu_offload": [True]}, [f"m-full-bf16-batch_size={n}-cpu_offload=true" for n in (1, 2)]),
        (M, {"gpus": (2**n for n in range(3))}, [f"m-full-bf16-gpus={n}" for n in (1, 2, 4)]),
        (M.replace(named=("batch_size",)), {"gpus": [2], "batch_size": [3]}, ["m-full-bf16-batch_size=3-gpus=2"]),
    ],
)
def test_grid_varies_the_last_axis_fastest_and_names_each_knob_once(base, axes, ids):
    assert [str(case) for case in grid(base, **axes)] == ids


def test_grid_keeps_what_it_does_not_vary_and_gives_every_case_all_platforms():
    base = CASE.replace(platforms=("a100",))
    assert [case.replace(model=base.model) for case in grid(base, model=["a", "b"])] == [base, base]
    assert [case.platforms for case in grid(base, model=["a", "b"], platforms=["h100", "h200"])] == [("h100", "h200")] * 2


@pytest.mark.parametrize(
    ("axes", "sentence"),
    [
        ({"batchsize": ["x"]}, r"no axis 'batchsize' \(did you mean 'batch_size'\?\)$"),
        ({"methods": ["x"]}, r"no axis 'methods' \(did you mean 'method'\?\)$"),
        *(({name: ["x"]}, f"no axis '{name}'") for name in ("zzz", "named", "code", "args")),
        ({"model": "llama-3.1-8b"}, r"model=\['llama-3.1-8b'\]"),
        ({"platforms": "h100"}, r"platforms=\['h100'\]"),
    ],
)
def test_grid_refuses_what_is_no_axis_and_a_string_for_a_list(axes, sentence):
    with pytest.raises(TypeError, match=sentence):
        grid(CASE, **axes)


@pytest.mark.parametrize(
    "case",
    [
        *(CASE.replace(**fields) for fields in ({}, {"platforms": ("h100", "cpu")}, {"warmup": 0})),
        *(CUSTOM, CUSTOM.replace(precision="fp16-amp"), SERVED),
    ],
)
def test_sound_cases_have_no_problem(case):
    assert problem(case, MARKERS) is None


@pytest.mark.parametrize("model", sorted(architectures()))
def test_every_model_of_the_zoo_is_known(model):
    needed = {"sequence_length": 64, "resolution": "512x512", "frames": 9}
    fields = {field: needed[field] for field in architectures()[model].needs}
    for method in architectures()[model].trainable:
        assert problem(Case(model=model, method=method, **fields), MARKERS) is None


WRONG_VALUES = {
    "model": ["", "lama-3.1-8b", "zzzzzz"],
    "part": ["all", "vision"],
    "method": ["lorra", "custom", "pretrain"],
    "precision": ["bf-16"],
    "parallel": ["fsdpp", "ps"],
    "optimizer": ["adamww", "adamw-8bit"],
    "platforms": [("h100", "h1000")],
    "gpus": [0, 2],
    "servers": [-1, 1],
    "batch_size": [0],
    "gradient_accumulation": [-1],
    "steps": [0],
    "warmup": [-1],
    "sequence_length": [1],
    "resolution": ["512x512"],
    "frames": [9],
    "lora_alpha": [-1],
    "lora_dropout": [1.0, NAN],
    "lora_targets": ["q_proj,v_proj", "all-linear+q_proj"],
    "compile": ["fast"],
    "lengths": ["ragged"],
    "id_distribution": ["skewed", "zipf"],
    "loader_workers": [-1],
    "loss": ["fp16"],
    "loss_chunks": [0],
    "attention": ["spda"],
    "quantized_compute": ["fp32"],
    "unquantized_fp32": [False],
    "activation_checkpointing": [1.5],
    "activation_checkpointing_policy": ["save-mm"],
    "learning_rate": [NAN],
    "max_grad_norm": [-1.0],
    "lr_warmup_steps": [-1],
    "lr_scheduler": ["cosin"],
    "reshard_after_forward": [False],
    "overlap_comm": [False],
    "deepspeed_config": ["a.json"],
    "cpu_offload": [True],
}
"""Of a field of ``CASE`` alone."""

FULL = {"method": "full"}
PANGU = {"model": "pangu-350m", **FULL}
MASTERS = {**FULL, "master_weights": True}
RECOMPUTING = {"activation_checkpointing": True}
SAVING = {"activation_checkpointing_policy": "save-attention"}
REENTRANT = {"reentrant_checkpointing": True}
WRONG_TOGETHER = [
    {"precision": "fp16", "parallel": "zero1"},
    {"optimizer": "adamw_8bit", "parallel": "fsdp", "gpus": 2},
    {"optimizer": "adafactor", "parallel": "zero2", "gpus": 2},
    *({**FULL, **knob} for knob in ({"lora_rank": 4}, {"dora": True}, {"lora_dropout": 0.0}, {"lora_targets": "q_proj"})),
    {"lora_targets": "q_proj+lm_head", "loss_chunks": 2},
    {"model": "llava-1.6-7b", "resolution": "336x336", "lora_targets": "q_proj"},
    {"compile": "default", "warmup": 0},
    {"epoch": True},
    {"compile": "default", "parallel": "zero3", "gpus": 2},
    {"compile": "reduce-overhead", "parallel": "zero2", "gpus": 2},
    *({**PANGU, **knob} for knob in ({"lengths": "padded"}, {"loss": "fp32"}, {"attention": "eager"})),
    {"model": "gemma-2-9b", "loss_chunks": 2},
    {"model": "gemma-2-9b", "attention": "sdpa"},
    {**FULL, "loss_chunks": 2, "parallel": "zero3", "gpus": 2},
    {"precision": "bf16", "tf32": True},
    {"precision": "bf16-amp", "tf32": False},
    {**REENTRANT, "activation_checkpointing": False},
    {**REENTRANT, **RECOMPUTING, "compile": "default"},
    {**SAVING, "activation_checkpointing": False},
    {**SAVING, **RECOMPUTING, **REENTRANT},
    {**RECOMPUTING, "activation_checkpointing_policy": "save-matmuls", "compile": "default"},
    {**SAVING, **RECOMPUTING, "attention": "eager"},
    {**SAVING, **RECOMPUTING, "model": "gemma-2-9b"},
    {**MASTERS, "precision": "fp32"},
    {**MASTERS, "method": "lora"},
    *({**MASTERS, "parallel": parallel, "gpus": 2} for parallel in ("fsdp", "ddp", "zero1")),
    {"method": "qlora", "quantized_compute": "fp32", "precision": "bf16-amp"},
    {"method": "qlora", "unquantized_fp32": True, "precision": "fp32"},
    {"method": "qlora", "unquantized_fp32": True, "precision": "bf16", "parallel": "zero2", "gpus": 2},
    {"parallel": "ps", "servers": 1, "max_grad_norm": 1.0},
    {"parallel": "ps", "servers": 1, "lr_scheduler": "linear"},
    {"parallel": "ps", "servers": 1, "precision": "fp16-amp"},
    {"parallel": "fsdp", "cpu_offload": True, "max_grad_norm": 1.0},
    {"parallel": "zero2", "offload_param": True},
    {"parallel": "zero0", "offload_optimizer": True},
    {"parallel": "ddp", "asynchronous": True},
]
WRONG_OF_OWN_CODE = [
    *({"method": "full"}, {"precision": "fp16"}, {"platforms": ("gtx",)}, {"platforms": "h100"}, {"sequence_length": -1}),
    *({"compile": "default"}, {"loader_workers": 2}, {"loss": "fp32"}, {"loss_chunks": 2}, {"attention": "flash"}),
    {"precision": "bf16", "master_weights": True},
    {"parallel": "zero1", "gpus": 2, "deepspeed_config": "a.json"},
    {"resolution": "512"},
    {"parallel": "ps", "servers": 1},
]


@pytest.mark.parametrize("field", WRONG_VALUES)
def test_problem_names_the_field_and_the_remedy_of_a_wrong_value(field):
    for value in WRONG_VALUES[field]:
        case = CASE.replace(**{field: value})
        sentence = problem(case, MARKERS)
        assert sentence is not None, value
        what, _, remedy = sentence.partition("; ")
        assert what.startswith(f"the case {case} ")
        assert field.rstrip("s") in what.lower()
        assert remedy


def test_problem_names_what_contradicts_and_the_remedy(snapshot):
    said = {}
    for base, changes in ((CASE, WRONG_TOGETHER), (CUSTOM, WRONG_OF_OWN_CODE)):
        for change in changes:
            case = base.replace(**change)
            sentence = problem(case, MARKERS)
            assert sentence is not None, change
            assert str(case) in sentence
            listed = {"models": architectures(), "platforms": MARKERS}
            for what, names in listed.items():
                sentence = sentence.replace(", ".join(names), f"(all {what})")
            said[f"{base.method} {change}"] = sentence
    assert said == snapshot


@pytest.mark.parametrize("field", msgspec.structs.fields(Case), ids=lambda field: field.name)
def test_problem_names_the_field_of_a_wrong_type(field):
    """Of every type that msgspec would not read into the field, by which a worker would fail."""
    wrong = 0
    for value in (None, True, 5, 1.5, "text", ["x"], (3,), {"stage": 2}, b"x"):
        try:
            msgspec.convert(value, field.type)
        except msgspec.ValidationError:
            sentence = problem(CASE.replace(**{field.name: value}), MARKERS)
            assert sentence is not None, value
            assert field.name in sentence, value
            wrong += 1
    assert wrong >= 3


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=2) | st.tuples(inner) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=3,
)


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(Case.__struct_fields__, ANYTHING)))
@example({"model": b"llama"})
@example({"model": "llama\n3"})
@example({"named": ("no_field",)})
@example({"gpus": object()})
@example({"platforms": {"h100"}})
def test_any_case_gets_one_line_or_none_of_its_problem(fields):
    sentence = problem(CASE.replace(**fields), MARKERS)
    assert sentence is None or (sentence and len(sentence.splitlines()) == 1)


def test_identity_ignores_how_and_where_a_case_runs_and_knows_values_by_equality():
    other = CASE.replace(steps=99, warmup=0, platforms=("h100",), named=("batch_size",))
    assert other.identity() == CASE.identity()
    assert differences(CASE, other) == ""
    both = CASE.replace(batch_size=4, optimizer="adamw-fused")
    assert differences(CASE, both) == "batch_size 2 -> 4, optimizer adamw -> adamw-fused"
    for field in ("method", "precision", "parallel", "optimizer"):
        default = getattr(Case(), field)
        computed = Case(**{field: "".join([default[:1], default[1:]])})  # as of a file: another object
        assert computed == Case()
        assert computed.identity() == Case().identity()


@pytest.mark.parametrize("field", sorted(set(Case.__struct_fields__) - {"steps", "warmup", "epoch", "platforms", "named"}))
def test_identity_and_differences_tell_what_a_case_trains(field):
    value = {"gpus": 2, "args": {"a": 1}}.get(field, "another")
    other = CASE.replace(**{field: value})
    assert other.identity() != CASE.identity()
    assert differences(CASE, other) == f"{field} {getattr(CASE, field)} -> {value}"
