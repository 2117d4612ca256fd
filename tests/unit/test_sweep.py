"""``--gpu-set``: from text to values, and over cases."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_examples import CASE, values_of

from pytest_gputrain.cases.sweep import combinations, override, parse_axes, shown
from pytest_gputrain.hardware.catalog import MARKERS
from pytest_gputrain.records import Case

KNOBS = [name for name in Case.__struct_fields__ if name not in ("platforms", "named", "code", "args")]


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("batch_size=1,2,4", (1, 2, 4)),
        (" batch_size = 1, 2 ", (1, 2)),
        ("learning_rate=1e-6,5e-5", (1e-6, 5e-5)),
        ("lr_scheduler=constant,cosine", ("constant", "cosine")),
        ("lr_warmup_steps=0,150", (0, 150)),
        ("max_grad_norm=0,1.5", (0.0, 1.5)),
        ("cpu_offload=true,false", (True, False)),
        ("activation_checkpointing=true,0.5", (True, 0.5)),
        ("overlap_comm=true,null", (True, None)),
        ("precision=bf16,fp16-amp", ("bf16", "fp16-amp")),
        ("resolution=512x512,1024x1024", ("512x512", "1024x1024")),
        ("model=llama-3.1-8b", ("llama-3.1-8b",)),
    ],
)
def test_values_have_the_type_of_their_field(text, values):
    ((_, knob_values),) = parse_axes(text, MARKERS)
    assert knob_values == values
    assert list(map(type, knob_values)) == list(map(type, values))


REFUSED = (
    "batchsize=1 platforms=h100,h10 platforms=h100,h100 named=batch_size code=a.py::b batch_size batch_size= =1 "
    "batch_size=1,,2 batch_size=two batch_size=0 batch_size=1,1 precision=bf61 precision=fp32,fp16 optimizer=adamww "
    "optimizer=adamW model=gemma-7 method=custom learning_rate=nan cpu_offload=maybe resolution=512"
)


def test_what_cannot_be_is_told_in_one_sentence(snapshot):
    said = {}
    for text in [*REFUSED.split(" "), "batch_size=1\nbatch_size=2"]:
        with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
            parse_axes(text, MARKERS)
        said[text] = str(caught.value).partition("; known: ")[0]
    assert said == snapshot


def test_combinations_are_the_product_with_the_last_knob_fastest():
    assert combinations(parse_axes("batch_size=1,2\ncpu_offload=true,false", MARKERS)) == [
        {"batch_size": 1, "cpu_offload": True},
        {"batch_size": 1, "cpu_offload": False},
        {"batch_size": 2, "cpu_offload": True},
        {"batch_size": 2, "cpu_offload": False},
    ]


def test_platforms_are_one_list_that_changes_no_id():
    (knobs,) = combinations(parse_axes("platforms=l40s, h200", MARKERS))
    assert shown(knobs) == "platforms=l40s+h200"
    declared = CASE.replace(platforms=("h100",))
    assert override(declared, knobs).platforms == ("l40s", "h200")
    assert str(override(declared, knobs)) == str(declared)


@pytest.mark.parametrize(
    ("case", "knobs", "shown_id"),
    [
        (Case(model="m"), {"batch_size": 4, "cpu_offload": True}, "m-full-bf16-batch_size=4-cpu_offload=true"),
        (CASE, {"batch_size": 4}, f"{CASE}-batch_size=4"),
        (CASE, {"precision": "fp32", "model": "gemma-7b"}, "gemma-7b-lora-fp32"),
        (CASE.replace(named=("batch_size", "optimizer")), {"batch_size": 8}, f"{CASE}-batch_size=8-optimizer=adamw"),
    ],
)
def test_a_knob_that_changes_enters_the_id_once_in_its_place(case, knobs, shown_id):
    swept = override(case, knobs)
    assert str(swept) == shown_id
    assert swept.identity() != case.identity()
    assert shown({"batch_size": 4, "cpu_offload": True}) == "batch_size=4-cpu_offload=true"


@given(values_of(Case), st.data())
def test_values_as_declared_change_nothing(case, data):
    knobs = {knob: getattr(case, knob) for knob in data.draw(st.sets(st.sampled_from(KNOBS)))}
    assert override(case, knobs) == case
