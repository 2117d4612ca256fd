"""Samples of several lengths, padded or packed, and ids of uneven frequency: what they hold, compute and cost."""

import collections
import itertools
from unittest import mock

import pytest
import torch
from zoo_examples import DEVICE, LANGUAGE, built, example, inputs_of, measured

from pytest_gputrain.worker.zoo import language
from pytest_gputrain.worker.zoo.click_through import SLOTS
from pytest_gputrain.worker.zoo.language import IGNORED_LABEL
from pytest_gputrain.worker.zoo.samples import packed_positions, spread_lengths, zipf

VISION_LANGUAGE = ["llava-1.6-7b", "qwen2-vl-2b"]
IMAGE = {"llava-1.6-7b": {"resolution": "336x336"}, "qwen2-vl-2b": {"resolution": "504x364", "sequence_length": 512}}


def workload(model, **knobs):
    method = "sft" if model in VISION_LANGUAGE else "full"
    fields = {"method": method, "precision": "fp32", "sequence_length": 2048, "batch_size": 4, **IMAGE.get(model, {})}
    return built(model, **{**fields, **knobs})


# Padded


def test_tokens_are_counted_without_padding():
    assert spread_lengths(128, 8) == [128, 112, 96, 80, 64, 48, 32, 16]
    assert spread_lengths(4, 2) == [4, 1]
    assert spread_lengths(128, 1) == [128], "as a search for the largest batch begins"
    case = example("llama-3.1-8b", lengths="padded", batch_size=8, precision="fp32", steps=2, warmup=1)
    padded, filled, packed = (measured(case.replace(lengths=lengths)) for lengths in ("padded", "fixed", "packed"))
    assert padded.tokens == sum(spread_lengths(128, 8)) == 576
    assert padded.tokens_per_second == pytest.approx(576 / padded.median_step_seconds)
    for whole in (filled, packed):
        assert whole.tokens is None
        assert whole.tokens_per_second == pytest.approx(8 * 128 / whole.median_step_seconds)


@pytest.mark.parametrize("model", ["llama-3.1-8b", *VISION_LANGUAGE])
def test_padding_has_no_label_and_no_part_in_the_tokens(model):
    batch, filled = (workload(model, lengths=lengths).batch(DEVICE) for lengths in ("padded", "fixed"))
    lengths = batch.inputs["attention_mask"].sum(1).tolist()
    assert len(set(lengths)) == len(lengths), "all samples differ"
    assert max(lengths) == batch.sequence_length == filled.sequence_length
    assert batch.tokens == sum(lengths)
    for labels, length in zip(batch.inputs["labels"], lengths, strict=True):
        assert (labels[length - 1 :] == IGNORED_LABEL).all()
        assert labels[length - 2] != IGNORED_LABEL


@pytest.mark.parametrize("model", [*LANGUAGE, *VISION_LANGUAGE])
def test_what_lies_in_the_padding_does_not_matter(model):
    work = workload(model, lengths="padded")
    inputs = inputs_of(work)
    loss = work.loss(inputs)
    real = inputs["attention_mask"].bool()
    others = (inputs["input_ids"] + 1) % 400  # text, in every vocabulary of the tiny scale
    inputs["input_ids"] = torch.where(real, inputs["input_ids"], others)
    assert work.loss(inputs).item() == pytest.approx(loss.item(), rel=1e-5)
    inputs["attention_mask"] = torch.ones_like(inputs["attention_mask"])
    assert work.loss(inputs).item() == pytest.approx(loss.item(), rel=1e-5), "padding comes after what has labels"


def test_memory_and_work_of_padded_samples_are_those_of_the_longest():
    case = example("llama-3.1-8b", batch_size=8, precision="fp32", lengths="padded", steps=2, warmup=1)
    spread = measured(case)
    with mock.patch.object(language, "spread_lengths", lambda longest, count: [longest - 1] * (count - 1) + [longest]):
        filled = measured(case)
    assert filled.tokens == 8 * 128 - 7
    assert spread.peak_allocated_bytes == filled.peak_allocated_bytes
    assert spread.flops_per_step == filled.flops_per_step
    # Without a mask attention needs none, and is causal by itself.
    assert measured(case.replace(lengths="fixed")).peak_allocated_bytes < spread.peak_allocated_bytes


@pytest.mark.parametrize("chunks", [2, 64])
def test_a_chunk_of_nothing_but_padding_adds_no_loss(chunks):
    whole, parts = (workload("llama-3.1-8b", lengths="padded", loss_chunks=count) for count in (1, chunks))
    parts.model.load_state_dict(whole.model.state_dict())
    inputs = inputs_of(whole)
    assert parts.loss(inputs).item() == pytest.approx(whole.loss(inputs).item(), rel=1e-5)


# Packed


def test_packed_rows_are_filled_by_samples_that_begin_at_zero():
    torch.manual_seed(0)
    positions = packed_positions(50, 128, DEVICE)
    assert positions.shape == (50, 128)
    assert (positions[:, 0] == 0).all()
    follows = positions[:, 1:] == positions[:, :-1] + 1
    assert (follows | (positions[:, 1:] == 0)).all()
    whole = [row[start] + 1 for row in positions for start in (row == 0).nonzero().flatten()[1:] - 1]
    assert min(whole) >= 16
    assert max(whole) <= 128
    assert 1.4 < (positions == 0).sum() / 50 < 2.6


@pytest.mark.parametrize("model", LANGUAGE)
def test_packed_samples_do_not_see_each_other(model):
    """The loss is that of the same samples, each in a row of its own."""
    work = workload(model, lengths="packed")
    inputs = inputs_of(work)
    positions = inputs["position_ids"]
    assert (positions == 0).sum() > len(positions), "some row has two"
    total = count = 0
    for ids, row in zip(inputs["input_ids"], positions, strict=True):
        starts = [*(row == 0).nonzero().flatten().tolist(), len(row)]
        for start, end in itertools.pairwise(starts):
            if end - start > 1:
                sample = ids[start:end].unsqueeze(0)
                labels = torch.cat([sample[:, 1:], torch.tensor([[IGNORED_LABEL]])], dim=1)
                total += work.loss({"input_ids": sample, "labels": labels}).item() * (end - start - 1)
                count += end - start - 1
    assert (inputs["labels"] != IGNORED_LABEL).sum() == count
    assert work.loss(inputs).item() == pytest.approx(total / count, rel=1e-5)


# Ids


@pytest.mark.parametrize("exponent", [1, 0.75])
def test_frequencies_fall_with_the_power_of_the_rank(exponent):
    torch.manual_seed(0)
    drawn = zipf(1000, (200_000,), exponent, DEVICE)
    assert drawn.dtype == torch.int64
    assert (drawn.min(), drawn.max()) == (0, 999)
    counts = collections.Counter(drawn.tolist())
    early, late = (sum(counts[rank - 1] for rank in range(first, 2 * first)) for first in (8, 256))
    assert early / late == pytest.approx((8 / 256) ** (1 - exponent), rel=0.1)
    assert set(zipf(3, (1000,), exponent, DEVICE).tolist()) == {0, 1, 2}


def test_slots_are_those_of_criteo():
    assert (len(SLOTS), sum(SLOTS)) == (26, 33_762_577)


def unique_rows(model, ids):
    inputs = inputs_of(built(model, "full", "meta", id_distribution=ids, batch_size=1000, optimizer="sgd", precision="fp32"))
    return len(inputs["ids" if model == "ctr-dnn" else "candidates"].unique())


@pytest.mark.parametrize(("model", "share"), [("word2vec", 0.83), ("ctr-dnn", 0.39)])
def test_skewed_ids_name_fewer_rows(model, share):
    even, skewed = unique_rows(model, "uniform"), unique_rows(model, "zipf")
    assert skewed / even == pytest.approx(share, abs=0.02)
