"""``--gpu-set``: from text to values, and over cases."""

from __future__ import annotations

import re
from typing import Any

import msgspec
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
def test_values_have_the_type_of_their_field(text: str, values: tuple[Any, ...]) -> None:
    ((_, knob_values),) = parse_axes(text, MARKERS)
    assert knob_values == values
    assert list(map(type, knob_values)) == list(map(type, values))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("batchsize=1", "'batchsize' is not a knob of a case (did you mean 'batch_size'?); known: model, "),
        ("platforms=h100,h10", "the platform 'h10' is unknown (did you mean 'h100'?); known: "),
        ("platforms=h100,h100", "'platforms=h100,h100' gives a value twice"),
        ("named=batch_size", "'named' is not a knob of a case"),
        ("code=a.py::b", "'code' is not a knob of a case"),
        ("batch_size", "'batch_size' is not a knob with its values; write it as batch_size=1,2,4"),
        ("batch_size=", "'batch_size=' is not a knob with its values"),
        ("=1", "'' is not a knob of a case"),
        ("batch_size=1,,2", "batch_size='' is not a whole number"),
        ("batch_size=two", "batch_size='two' is not a whole number"),
        ("batch_size=0", "a case has batch_size=0; it must be at least 1"),
        ("batch_size=1,1", "'batch_size=1,1' gives a value twice"),
        ("batch_size=1\nbatch_size=2", "batch_size is given twice; give all of its values at once, as batch_size=A,B"),
        ("precision=bf61", "the precision 'bf61' is unknown (did you mean 'bf16'?); known: fp32, "),
        ("precision=fp32,fp16", "a case would name the precision 'fp16', which is called 'fp16-amp' (autocast over weights"),
        ("optimizer=adamww", "the optimizer 'adamww' is unknown (did you mean 'adamw'?); known: adamw, "),
        ("model=gemma-7", "the model 'gemma-7' is unknown (did you mean 'gemma-7b'?); known: "),
        ("method=custom", "the method 'custom' is unknown"),
        ("learning_rate=nan", "a case has learning_rate=nan; it must be a finite number of at least 0"),
        ("cpu_offload=maybe", "cpu_offload='maybe' is not true or false"),
        ("resolution=512", "a case has resolution='512'; write it as WIDTHxHEIGHT"),
    ],
)
def test_what_cannot_be_is_told_in_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as caught:
        parse_axes(text, MARKERS)
    assert len(str(caught.value).splitlines()) == 1


@given(st.sampled_from(KNOBS), st.text())
def test_any_value_is_of_its_type_or_refused(knob: str, text: str) -> None:
    try:
        axes = parse_axes(f"{knob}={text}", MARKERS)
    except ValueError:
        return
    for parsed_knob, values in axes:
        assert parsed_knob == knob
        for value in values:
            msgspec.convert(msgspec.structs.asdict(Case(**{knob: value})), Case)


def test_combinations_are_the_product_with_the_last_knob_fastest() -> None:
    assert combinations(parse_axes("batch_size=1,2\ncpu_offload=true,false", MARKERS)) == [
        {"batch_size": 1, "cpu_offload": True},
        {"batch_size": 1, "cpu_offload": False},
        {"batch_size": 2, "cpu_offload": True},
        {"batch_size": 2, "cpu_offload": False},
    ]


def test_platforms_are_one_list_that_changes_no_id() -> None:
    (knobs,) = combinations(parse_axes("platforms=l40s, h200", MARKERS))
    assert shown(knobs) == "platforms=l40s+h200"
    declared = CASE.replace(platforms=("h100",))
    assert override(declared, knobs).platforms == ("l40s", "h200")
    assert str(override(declared, knobs)) == str(declared)


def test_a_combination_is_shown_as_ids_show_knobs() -> None:
    knobs = {"batch_size": 4, "cpu_offload": True}
    assert (
        str(override(Case(model="m"), knobs)) == f"m-full-bf16-{shown(knobs)}" == "m-full-bf16-batch_size=4-cpu_offload=true"
    )


def test_a_knob_that_changes_enters_the_id() -> None:
    assert str(override(CASE, {"batch_size": 4})) == f"{CASE}-batch_size=4"


def test_a_knob_that_always_is_in_the_id_is_not_named_again() -> None:
    assert str(override(CASE, {"precision": "fp32", "model": "gemma-7b"})) == "gemma-7b-lora-fp32"


@given(values_of(Case), st.data())
def test_values_as_declared_change_nothing(case: Case, data: st.DataObject) -> None:
    knobs = {knob: getattr(case, knob) for knob in data.draw(st.sets(st.sampled_from(KNOBS)))}
    assert override(case, knobs) == case


@given(st.integers(1, 64), st.integers(1, 64))
def test_cases_share_an_id_only_where_they_are_the_same(declared: int, given_: int) -> None:
    case = CASE.replace(batch_size=declared)
    swept = override(case, {"batch_size": given_})
    assert swept.batch_size == given_
    assert (str(swept) == str(case)) == (swept.identity() == case.identity())


def test_a_knob_named_by_a_grid_stays_in_its_place() -> None:
    case = CASE.replace(named=("batch_size", "optimizer"))
    assert str(override(case, {"batch_size": 8})) == f"{CASE}-batch_size=8-optimizer=adamw"
