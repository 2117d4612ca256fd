"""BERT-large trains on masked tokens and next sentences."""

import torch
from torch.nn import functional
from zoo_examples import built, inputs_of


def test_fifteen_percent_of_the_tokens_are_masked_and_to_be_told():
    inputs = inputs_of(built("bert-large", batch_size=5))
    ids, labels = inputs["input_ids"], inputs["labels"]
    masked = labels != -100
    assert (masked.sum(dim=1) == round(0.15 * 64)).all()
    assert (ids[masked] == 103).all()
    assert (labels[masked] > 0).all()
    assert len({tuple(row.nonzero().flatten().tolist()) for row in masked}) > 1, "every sample hides the same places"
    assert ((inputs_of(built("bert-large", sequence_length=2))["labels"] != -100).sum(dim=1) == 1).all(), (
        "and short ones one"
    )


def test_samples_are_pairs_of_sentences_without_padding():
    inputs = inputs_of(built("bert-large", batch_size=16))
    assert (inputs["input_ids"] > 0).all()
    assert (inputs["token_type_ids"] == torch.arange(64) // 32).all()
    assert set(inputs["next_sentence_label"].tolist()) == {0, 1}


def test_loss_is_that_of_the_masked_tokens_and_of_the_next_sentence():
    workload = built("bert-large")
    workload.model.eval()
    inputs = inputs_of(workload)
    outputs = workload.model(input_ids=inputs["input_ids"], token_type_ids=inputs["token_type_ids"])
    masked = inputs["labels"] != -100
    tokens = functional.cross_entropy(outputs.prediction_logits[masked], inputs["labels"][masked])
    sentences = functional.cross_entropy(outputs.seq_relationship_logits, inputs["next_sentence_label"])
    torch.testing.assert_close(workload.loss(inputs), tokens + sentences)
