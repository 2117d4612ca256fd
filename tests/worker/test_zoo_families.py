"""What models of several families have in common."""

import re

import pytest
import torch
from zoo_examples import built, example, inputs_of, measured, run

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.records import Crashed

WITH_POSITIONS = {"pangu-350m": 1024, "bert-large": 512, "transformer-big": 256}
"""Models by the length of their table of positions at full size."""


@pytest.mark.parametrize(("name", "positions"), WITH_POSITIONS.items())
def test_a_sample_longer_than_the_table_of_positions_is_told_at_any_scale(name, positions):
    reply = run(example(name, sequence_length=positions + 1))
    assert isinstance(reply, Crashed)
    assert reply.sentence == (
        f"{name} has a table of {positions:,} positions, too few for sequence_length={positions + 1}; "
        f"set it to at most {positions}"
    )


@pytest.mark.parametrize("name", WITH_POSITIONS)
def test_a_sample_has_the_case_s_length_up_to_the_tiny_table(name):
    most = architectures()[name].trained_part.facts("tiny")["max_position_embeddings"]
    for asked, expected in [(7, 7), (most, most), (most + 1, most)]:
        batch = built(name, sequence_length=asked).batch(torch.device("cpu"))
        assert batch.sequence_length == batch.inputs["input_ids"].shape[1] == expected


@pytest.mark.parametrize("name", WITH_POSITIONS)
def test_only_what_is_said_to_be_idle_gets_no_gradient_but_rounding(name):
    """A bias of all keys adds the same to every score of a query, which the softmax takes away again."""
    torch.manual_seed(0)
    workload = built(name)
    workload.loss(inputs_of(workload)).backward()
    largest = {key: value.grad.abs().max() for key, value in workload.model.named_parameters() if value.requires_grad}
    (pattern,) = architectures()[name].idle["tiny"]
    idle = [value for key, value in largest.items() if re.fullmatch(pattern, key)]
    others = [value for key, value in largest.items() if not re.fullmatch(pattern, key)]
    assert len(idle) >= 2
    assert max(idle) < 1e-2 * min(others)


@pytest.mark.parametrize("precision", ["fp32", "bf16-amp", "fp16-amp"])
@pytest.mark.parametrize("name", [*WITH_POSITIONS, "resnet-50", "vgg-16", "word2vec", "ctr-dnn", "wide-deep"])
def test_every_precision_trains_every_family(name, precision):
    assert measured(example(name, precision=precision, steps=1, warmup=1)).updates >= 2
