"""Cases: their ids, grids of them, what is wrong with one, and which of two mean the same."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from unit_examples import CASE, values_of

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.cases.grid import grid
from pytest_gputrain.cases.identity import differences
from pytest_gputrain.cases.validation import OPTIMIZERS, PRECISIONS, problem
from pytest_gputrain.hardware.catalog import MARKERS
from pytest_gputrain.records import Case

CHECKPOINTED = CASE.replace(activation_checkpointing=True)
CUSTOM = Case(model="my_step", method="custom", precision="fp32", code="tests/test_mine.py::my_step")
SERVED = Case(model="word2vec", optimizer="sgd", parallel="ps", gpus=2, servers=1, asynchronous=True)


@pytest.mark.parametrize(
    ("case", "shown"),
    [
        (Case(model="llama-3.1-8b"), "llama-3.1-8b-full-bf16"),
        (Case(model="llama-3.1-8b", method="qlora", precision="bf16-amp"), "llama-3.1-8b-qlora-bf16-amp"),
        (Case(model="llama-3.1-8b", parallel="fsdp", gpus=8), "llama-3.1-8b-full-bf16-fsdp"),
        (Case(model="m", batch_size=32), "m-full-bf16"),
        (Case(model="m", batch_size=32, named=("batch_size",)), "m-full-bf16-batch_size=32"),
        (Case(model="m", steps=5, gpus=2, named=("steps", "gpus")), "m-full-bf16-steps=5-gpus=2"),
        (Case(model="m", cpu_offload=True, named=("cpu_offload",)), "m-full-bf16-cpu_offload=true"),
        (Case(model="m", named=("activation_checkpointing",)), "m-full-bf16-activation_checkpointing=false"),
        (CUSTOM, "my_step-fp32"),
    ],
)
def test_id_names_what_tells_cases_apart(case: Case, shown: str) -> None:
    assert str(case) == shown


def test_grid_varies_the_last_axis_fastest() -> None:
    cases = grid(Case(), model=["a", "b"], method=["full", "lora"])
    assert [(case.model, case.method) for case in cases] == [("a", "full"), ("a", "lora"), ("b", "full"), ("b", "lora")]


def test_grid_keeps_the_fields_it_does_not_vary() -> None:
    assert all(case.replace(model="") == CASE.replace(model="") for case in grid(CASE, model=["a", "b"]))


def test_grid_names_the_knobs_it_varies() -> None:
    assert [str(case) for case in grid(Case(model="m"), batch_size=[1, 2], cpu_offload=[True])] == [
        "m-full-bf16-batch_size=1-cpu_offload=true",
        "m-full-bf16-batch_size=2-cpu_offload=true",
    ]


def test_grid_of_a_grid_names_each_knob_once() -> None:
    (first, *_) = grid(Case(model="m"), batch_size=[1, 2])
    (second,) = grid(first, gpus=[2], batch_size=[3])
    assert str(second) == "m-full-bf16-batch_size=3-gpus=2"


def test_grid_without_axes_is_the_base_alone() -> None:
    assert grid(CASE) == [CASE]


def test_grid_with_an_empty_axis_is_empty() -> None:
    assert grid(CASE, model=[]) == []


def test_grid_takes_any_iterable() -> None:
    assert [case.gpus for case in grid(CASE, gpus=(2**n for n in range(3)))] == [1, 2, 4]


def test_grid_gives_every_case_all_platforms() -> None:
    cases = grid(CASE.replace(platforms=("a100",)), model=["a", "b"], platforms=["h100", "h200"])
    assert [case.platforms for case in cases] == [("h100", "h200")] * 2


def test_grid_leaves_the_platforms_of_the_base_alone() -> None:
    assert grid(CASE.replace(platforms=("a100",)), model=["a"])[0].platforms == ("a100",)


def test_platforms_are_no_part_of_the_id() -> None:
    assert str(grid(CASE, platforms=["h100"])[0]) == str(CASE)


@pytest.mark.parametrize(
    ("axis", "hint"), [("batchsize", "did you mean 'batch_size'"), ("methods", "did you mean 'method'"), ("zzz", "'zzz'$")]
)
def test_grid_suggests_the_axis_that_was_meant(axis: str, hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        grid(CASE, **{axis: ["x"]})


@pytest.mark.parametrize("axis", ["named", "code", "args"])
def test_grid_refuses_fields_that_are_no_axis(axis: str) -> None:
    with pytest.raises(TypeError, match=f"no axis '{axis}'"):
        grid(CASE, **{axis: ["x"]})


def test_grid_refuses_a_string_for_an_axis() -> None:
    with pytest.raises(TypeError, match=r"model=\['llama-3.1-8b'\]"):
        grid(CASE, model="llama-3.1-8b")


def test_grid_refuses_a_string_for_the_platforms() -> None:
    with pytest.raises(TypeError, match=r"platforms=\['h100'\]"):
        grid(CASE, platforms="h100")


@given(
    st.fixed_dictionaries(
        {
            "model": st.lists(st.sampled_from(sorted(architectures())), unique=True, max_size=3),
            "batch_size": st.lists(st.integers(1, 99), unique=True, max_size=3),
            "cpu_offload": st.lists(st.booleans(), unique=True, max_size=2),
        }
    )
)
def test_cases_of_a_grid_have_different_ids(axes: dict[str, list[Any]]) -> None:
    cases = grid(CASE, **axes)
    assert len(cases) == len(axes["model"]) * len(axes["batch_size"]) * len(axes["cpu_offload"])
    assert len({str(case) for case in cases}) == len(cases)


@pytest.mark.parametrize(
    "case",
    [
        CASE,
        CUSTOM,
        CUSTOM.replace(precision="fp16-amp"),
        CASE.replace(platforms=("h100", "cpu")),
        CASE.replace(warmup=0),
        SERVED,
    ],
)
def test_sound_cases_have_no_problem(case: Case) -> None:
    assert problem(case, MARKERS) is None


@pytest.mark.parametrize("model", sorted(architectures()))
def test_every_model_of_the_zoo_is_known(model: str) -> None:
    architecture = architectures()[model]
    needed = {"sequence_length": 64, "resolution": "512x512", "frames": 9}
    fields = {field: needed[field] for field in architecture.needs}
    for method in architecture.trainable:
        assert problem(Case(model=model, method=method, **fields), MARKERS) is None


@pytest.mark.parametrize(
    ("case", "complaint"),
    [
        (CASE.replace(model=""), f"names no model; known: {', '.join(architectures())}"),
        (CASE.replace(model="lama-3.1-8b"), "unknown model 'lama-3.1-8b' (did you mean 'llama-3.1-8b'?); known: "),
        (CASE.replace(model="zzzzzz"), "unknown model 'zzzzzz'; known: "),
        (CASE.replace(method="lorra"), "unknown method 'lorra' (did you mean 'lora'?); known: full, lora, qlora"),
        (CASE.replace(method="custom"), "unknown method 'custom'"),
        (CUSTOM.replace(method="full"), "unknown method 'full'; known: custom"),
        (CASE.replace(precision="bf-16"), "unknown precision 'bf-16' (did you mean 'bf16'?)"),
        (
            CUSTOM.replace(precision="fp16"),
            "names the precision 'fp16', which is called 'fp16-amp' (autocast over weights in fp32); write that",
        ),
        (CASE.replace(precision="fp16", parallel="zero1"), "names the precision 'fp16', which is called 'fp16-amp'"),
        (CASE.replace(parallel="fsdpp"), "unknown parallel 'fsdpp' (did you mean 'fsdp'?)"),
        (CASE.replace(optimizer="adamww"), "unknown optimizer 'adamww' (did you mean 'adamw'?)"),
        (CASE.replace(optimizer="adamw-8bit"), "unknown optimizer 'adamw-8bit' (did you mean 'adamw_8bit'?)"),
        (
            CASE.replace(optimizer="adamw_8bit", parallel="fsdp", gpus=2),
            "optimizer='adamw_8bit', whose states are of whole weights, which parallel='fsdp' does not have; choose",
        ),
        (CASE.replace(optimizer="adafactor", parallel="zero2", gpus=2), "optimizer='adafactor', whose states are of whole"),
        (CASE.replace(platforms=("h100", "h1000")), "unknown platform 'h1000' (did you mean 'h100'?)"),
        (CUSTOM.replace(platforms=("gtx",)), "unknown platform 'gtx'"),
        (CUSTOM.replace(platforms="h100"), "takes a list of platforms: platforms=['h100']"),
        (CASE.replace(gpus=0), "gpus=0; it must be at least 1"),
        (CASE.replace(batch_size=0), "batch_size=0; it must be at least 1"),
        (CASE.replace(gradient_accumulation=-1), "gradient_accumulation=-1; it must be at least 1"),
        (CASE.replace(steps=0), "steps=0; it must be at least 1"),
        (CASE.replace(warmup=-1), "warmup=-1; it must be at least 0"),
        (CASE.replace(sequence_length=1), "sequence_length=1; it must be at least 2"),
        (CUSTOM.replace(sequence_length=-1), "sequence_length=-1; it must be at least 0"),
        (
            CASE.replace(method="pretrain"),
            "the method 'pretrain', which llama-3.1-8b does not have; it has full, lora, qlora",
        ),
        (CASE.replace(method="full", lora_rank=4), "sets lora_rank, which the method 'full' does not have"),
        (CASE.replace(method="full", dora=True), "sets dora, which the method 'full' does not have; choose lora or qlora"),
        (CASE.replace(method="full", lora_dropout=0.0), "sets lora_dropout, which the method 'full' does not have"),
        (CASE.replace(method="full", lora_targets="q_proj"), "sets lora_targets, which the method 'full' does not have"),
        (CASE.replace(lora_alpha=-1), "lora_alpha=-1; it must be at least 0"),
        (CASE.replace(lora_dropout=1.0), "lora_dropout=1.0; it must be at least 0 and below 1"),
        (CASE.replace(lora_dropout=float("nan")), "lora_dropout=nan; it must be at least 0 and below 1"),
        (CASE.replace(lora_targets="q_proj,v_proj"), "lora_targets='q_proj,v_proj'; write names with + between them"),
        (CASE.replace(lora_targets="all-linear+q_proj"), "all-linear stands for all layers, so write no other name"),
        (CASE.replace(lora_targets="q_proj+lm_head", loss_chunks=2), "loss_chunks, which computes the loss in the place of"),
        (
            CASE.replace(model="llava-1.6-7b", resolution="336x336", lora_targets="q_proj"),
            "sets lora_targets, but llava-1.6-7b has layers of these names in its frozen tower",
        ),
        (CASE.replace(compile="fast"), "the unknown compile 'fast'; known: off, default, reduce-overhead, max-autotune"),
        (CASE.replace(compile="default", warmup=0), "compile without a step of warm-up"),
        (
            CASE.replace(compile="default", parallel="zero3", gpus=2),
            "compile, which parallel='zero3' does not do; choose",
        ),
        (
            CASE.replace(compile="reduce-overhead", parallel="zero2", gpus=2),
            "compile='reduce-overhead', whose CUDA graphs overwrite gradients that DeepSpeed may still reduce; choose",
        ),
        (
            CUSTOM.replace(compile="default"),
            "compile, but own code compiles by itself; call torch.compile in it, and leave the knob out",
        ),
        (CASE.replace(lengths="ragged"), "the unknown lengths 'ragged'"),
        (CASE.replace(ids="skewed"), "the unknown ids 'skewed'"),
        (CASE.replace(loader_workers=-1), "loader_workers=-1; it must be at least 0"),
        (CASE.replace(ids="zipf"), "ids='zipf', which llama-3.1-8b does not have"),
        (
            CASE.replace(model="pangu-350m", method="full", lengths="padded"),
            "lengths='padded', which pangu-350m does not have",
        ),
        (CUSTOM.replace(loader_workers=2), "asks for loader_workers, but own code makes its batches by itself"),
        (CASE.replace(loss="fp16"), "the unknown loss 'fp16'; known: fp32"),
        (CASE.replace(model="pangu-350m", method="full", loss="fp32"), "loss='fp32', which pangu-350m does not have"),
        (CUSTOM.replace(loss="fp32"), "loss, but own code computes its loss by itself"),
        (CASE.replace(loss_chunks=0), "loss_chunks=0; it must be at least 1"),
        (CASE.replace(model="gemma-2-9b", loss_chunks=2), "loss_chunks, which gemma-2-9b does not have"),
        (CASE.replace(method="full", loss_chunks=2, parallel="zero3", gpus=2), "loss_chunks, whose head"),
        (CUSTOM.replace(loss_chunks=2), "loss_chunks, but own code computes its loss by itself"),
        (
            CASE.replace(precision="bf16", tf32=True),
            "sets tf32, which precision='bf16' does not compute in; choose precision='fp32'",
        ),
        (CASE.replace(precision="bf16-amp", tf32=False), "sets tf32, which precision='bf16-amp' does not compute in"),
        (
            CASE.replace(activation_checkpointing=False, reentrant_checkpointing=True),
            "reentrant_checkpointing, but recomputes nothing",
        ),
        (
            CASE.replace(activation_checkpointing=True, reentrant_checkpointing=True, compile="default"),
            "reentrant_checkpointing, which torch.compile does not take into a graph; leave out it or compile",
        ),
        (
            CASE.replace(activation_checkpointing=False, activation_checkpointing_policy="save-attention"),
            "activation_checkpointing_policy, but recomputes nothing; set activation_checkpointing=True",
        ),
        (
            CHECKPOINTED.replace(activation_checkpointing_policy="save-attention", reentrant_checkpointing=True),
            "activation_checkpointing_policy, which torch's reentrant variant does not have; leave out one",
        ),
        (
            CHECKPOINTED.replace(activation_checkpointing_policy="save-matmuls", compile="default"),
            "activation_checkpointing_policy, but torch.compile has its own; leave out it or compile",
        ),
        *(
            (
                CHECKPOINTED.replace(activation_checkpointing_policy="save-attention", **eager),
                "eager attention is plain products",
            )
            for eager in ({"attention": "eager"}, {"model": "gemma-2-9b"})
        ),
        (CASE.replace(activation_checkpointing_policy="save-mm"), "the unknown activation_checkpointing_policy 'save-mm'"),
        (CASE.replace(method="full", precision="fp32", master_weights=True), "but precision='fp32' stores weights in fp32"),
        (
            CASE.replace(method="lora", precision="bf16", master_weights=True),
            "but the adapters of 'lora' are in fp32 anyway",
        ),
        (
            CASE.replace(method="full", precision="bf16", parallel="fsdp", gpus=2, master_weights=True),
            "master_weights, which parallel='fsdp' does not do; choose precision='bf16-amp', whose shards are fp32 masters",
        ),
        (
            CASE.replace(method="full", precision="bf16", parallel="ddp", gpus=2, master_weights=True),
            "master_weights, which parallel='ddp' does not do; choose parallel='zero0'",
        ),
        (
            CASE.replace(method="full", precision="bf16", parallel="zero1", gpus=2, master_weights=True),
            "master_weights, which parallel='zero1' has in any case; leave it out",
        ),
        (
            CUSTOM.replace(precision="bf16", master_weights=True),
            "master_weights, but own code makes its optimizer by itself",
        ),
        (
            CASE.replace(reshard_after_forward=False),
            "reshard_after_forward, which parallel='single' does not do; choose parallel='fsdp'",
        ),
        (CASE.replace(overlap_comm=False), "overlap_comm, which parallel='single' does not do; choose parallel='zero0' or"),
        (CASE.replace(deepspeed_config="a.json"), "deepspeed_config, which parallel='single' does not do"),
        (
            CUSTOM.replace(parallel="zero1", gpus=2, deepspeed_config="a.json"),
            "deepspeed_config, but own code configures DeepSpeed by itself; read the file in it",
        ),
        (CASE.replace(attention="spda"), "unknown attention 'spda' (did you mean 'sdpa'?); known: eager, sdpa, sdpa-4.49"),
        (CASE.replace(model="gemma-2-9b", attention="sdpa"), "attention='sdpa', which cannot cap the scores of gemma-2-9b"),
        (CASE.replace(model="pangu-350m", method="full", attention="eager"), "attention, which pangu-350m does not have"),
        (CUSTOM.replace(attention="flash"), "attention, but own code chooses its attention by itself"),
        (CASE.replace(quantized_compute="fp32"), "quantized_compute, which the method 'lora' does not have"),
        (
            CASE.replace(method="qlora", quantized_compute="fp32", precision="bf16-amp"),
            "quantized_compute, which autocast of 'bf16-amp' overrides; choose precision='bf16' or 'fp32'",
        ),
        (CASE.replace(resolution="512x512"), "sets resolution, which llama-3.1-8b does not have"),
        (CUSTOM.replace(resolution="512"), "resolution='512'; write it as WIDTHxHEIGHT"),
        (CASE.replace(frames=9), "sets frames, which llama-3.1-8b does not have"),
        (CASE.replace(activation_checkpointing=1.5), "activation_checkpointing=1.5; it must be true, false or a share"),
        (CASE.replace(learning_rate=float("nan")), "learning_rate=nan; it must be a finite number"),
        (CASE.replace(max_grad_norm=-1.0), "max_grad_norm=-1.0; it must be a finite number of at least 0"),
        (CASE.replace(lr_warmup_steps=-1), "lr_warmup_steps=-1; it must be at least 0"),
        (CASE.replace(lr_scheduler="cosin"), "unknown lr_scheduler 'cosin' (did you mean"),
        (CASE.replace(parallel="ps", servers=1, max_grad_norm=1.0), "max_grad_norm, which parallel='ps' does not do"),
        (CASE.replace(parallel="ps", servers=1, lr_scheduler="linear"), "lr_scheduler, which parallel='ps' does not do"),
        (CASE.replace(parallel="fsdp", cpu_offload=True, max_grad_norm=1.0), "max_grad_norm, whose norm"),
        (
            CASE.replace(cpu_offload=True),
            "asks for cpu_offload, which parallel='single' does not do; choose parallel='fsdp'",
        ),
        (CASE.replace(parallel="zero2", offload_param=True), "offload_param, which parallel='zero2' does not do"),
        (CASE.replace(parallel="zero0", offload_optimizer=True), "offload_optimizer, which parallel='zero0' does not do"),
        (CASE.replace(gpus=2), "asks for 2 GPUs, but parallel='single' uses one"),
        (CASE.replace(servers=-1), "servers=-1; it must be at least 0"),
        (CASE.replace(servers=1), "asks for servers, which parallel='single' does not do; choose parallel='ps'"),
        (CASE.replace(parallel="ddp", asynchronous=True), "asks for asynchronous, which parallel='ddp' does not do"),
        (CASE.replace(parallel="ps"), "asks for parallel='ps', but has no servers; set servers=1 or more"),
        (
            CASE.replace(parallel="ps", servers=1, precision="fp16-amp"),
            "parallel='ps' does not do; choose precision='bf16-amp'",
        ),
        (CUSTOM.replace(parallel="ps", servers=1), "asks for parallel='ps', which own code does not have"),
    ],
)
def test_problem_names_the_field_and_the_remedy(case: Case, complaint: str) -> None:
    sentence = problem(case, MARKERS)
    assert sentence is not None
    assert complaint in sentence
    assert str(case) in sentence


WRONG_TYPES: dict[str, Any] = {
    "model": 5,
    "method": None,
    "precision": ["bf16"],
    "parallel": 1,
    "gpus": "1",
    "servers": "2",
    "asynchronous": "yes",
    "batch_size": 1.5,
    "sequence_length": None,
    "lengths": 1,
    "ids": None,
    "loader_workers": "2",
    "gradient_accumulation": True,
    "activation_checkpointing": "yes",
    "resolution": 512,
    "frames": 1.5,
    "activation_checkpointing_policy": True,
    "reentrant_checkpointing": 1,
    "lora_rank": "4",
    "lora_alpha": 1.5,
    "lora_dropout": "none",
    "lora_targets": ("q_proj",),
    "dora": 1,
    "quantized_compute": None,
    "attention": True,
    "loss": 32,
    "loss_chunks": "4",
    "compile": True,
    "tf32": "high",
    "master_weights": "fp32",
    "learning_rate": "fast",
    "lr_scheduler": 1,
    "lr_warmup_steps": 1.5,
    "max_grad_norm": "1",
    "optimizer": 0,
    "cpu_offload": 1,
    "reshard_after_forward": 8,
    "offload_optimizer": 1,
    "offload_param": "no",
    "pin_memory": 0,
    "overlap_comm": "auto",
    "allgather_bucket_size": 5e8,
    "reduce_bucket_size": True,
    "stage3_max_live_parameters": None,
    "deepspeed_config": {"stage": 2},
    "steps": "ten",
    "warmup": [3],
    "platforms": "h100",
    "code": 1,
    "args": 1,
    "named": (3,),
}


def test_the_wrong_types_cover_every_field() -> None:
    assert set(WRONG_TYPES) == set(Case.__struct_fields__)


@pytest.mark.parametrize("field", sorted(WRONG_TYPES))
def test_problem_names_the_field_of_a_wrong_type(field: str) -> None:
    sentence = problem(CASE.replace(**{field: WRONG_TYPES[field]}), MARKERS)
    assert sentence is not None
    assert field in sentence


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=2) | st.tuples(inner) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=3,
)
FIELDS = dict.fromkeys(Case.__struct_fields__, ANYTHING)
SOUND = st.builds(
    Case,
    model=st.sampled_from(
        sorted(
            name for name, architecture in architectures().items() if architecture.family == "language" and architecture.lora
        )
    ),
    method=st.sampled_from(["full", "lora"]),
    precision=st.sampled_from(PRECISIONS),
    optimizer=st.sampled_from(OPTIMIZERS),
    batch_size=st.integers(1, 2**40),
    sequence_length=st.integers(2, 16_384),  # positions of every model that is known by its config
    activation_checkpointing=st.booleans() | st.floats(0, 1),
    steps=st.integers(1, 99),
    warmup=st.integers(0, 99),
    platforms=st.lists(st.sampled_from(MARKERS), max_size=3).map(tuple),
)


@given(st.fixed_dictionaries({}, optional=FIELDS))
@example({"model": b"llama"})
@example({"model": "llama\n3"})
@example({"named": ("no_field",)})
@example({"gpus": object()})
@example({"platforms": {"h100"}})
def test_any_case_gets_one_line_or_none_of_its_problem(fields: dict[str, Any]) -> None:
    sentence = problem(CASE.replace(**fields), MARKERS)
    assert sentence is None or (sentence and len(sentence.splitlines()) == 1)


@given(SOUND)
def test_a_sound_case_survives_the_way_to_the_worker(case: Case) -> None:
    assert problem(case, MARKERS) is None
    assert msgspec.json.decode(msgspec.json.encode(case), type=Case) == case


@pytest.mark.parametrize(
    "change",
    [{"steps": 99}, {"warmup": 0}, {"platforms": ("h100",)}, {"named": ("batch_size",)}],
    ids=lambda change: next(iter(change)),
)
def test_identity_ignores_how_and_where_a_case_runs(change: dict[str, Any]) -> None:
    assert CASE.replace(**change).identity() == CASE.identity()


@pytest.mark.parametrize(
    "change",
    [
        {"model": "x"},
        {"method": "full"},
        {"precision": "fp32"},
        {"parallel": "fsdp"},
        {"gpus": 2},
        {"batch_size": 4},
        {"sequence_length": 4096},
        {"gradient_accumulation": 2},
        {"activation_checkpointing": True},
        {"optimizer": "adamw-fused"},
        {"cpu_offload": True},
        {"code": "a.py::b"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_identity_and_differences_tell_what_a_case_trains(change: dict[str, Any]) -> None:
    ((field, value),) = change.items()
    other = CASE.replace(**change)
    assert other.identity() != CASE.identity()
    assert differences(CASE, other) == f"{field} {getattr(CASE, field)} -> {value}"


def test_equal_cases_differ_in_nothing() -> None:
    assert differences(CASE, CASE.replace(steps=1)) == ""


def test_differences_are_listed_together() -> None:
    other = CASE.replace(batch_size=4, optimizer="adamw-fused")
    assert differences(CASE, other) == "batch_size 2 -> 4, optimizer adamw -> adamw-fused"


def _spelt_anew(text: str) -> str:
    """An equal string that is another object, as read from a file or put together at run time."""
    return "".join([text[:1], text[1:]])


@pytest.mark.parametrize("field", ["method", "precision", "parallel", "optimizer"])
def test_identity_knows_values_by_equality(field: str) -> None:
    default = getattr(Case(), field)
    computed = Case(**{field: _spelt_anew(default)})
    assert computed == Case()
    assert computed.identity() == Case().identity()
    assert differences(computed, Case()) == ""


@given(values_of(Case))
def test_identity_can_be_made_a_case_again(case: Case) -> None:
    assert Case(**case.identity()).identity() == case.identity()
