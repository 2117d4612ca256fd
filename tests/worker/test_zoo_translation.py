"""Transformer big is an encoder and a decoder with one table."""

import torch
from torch.nn import functional
from zoo_examples import built, inputs_of

from pytest_gputrain.cases.architectures.facts import architectures


def test_the_decoder_sees_the_targets_one_late_and_no_token_is_padding():
    inputs = inputs_of(built("transformer-big", batch_size=64, sequence_length=9))
    source, late, target = (inputs[name] for name in ("input_ids", "decoder_input_ids", "labels"))
    assert source.shape == late.shape == target.shape == (64, 9)
    assert (late[:, 0] == 1).all()
    assert torch.equal(late[:, 1:], target[:, :-1])
    assert (source > 1).all()
    assert (target > 1).all()
    assert not torch.equal(source, target)


def test_a_token_of_the_target_is_not_told_before_it_is_due():
    model = built("transformer-big").model.eval()
    source, target = torch.randint(2, 512, (2, 1, 16))
    changed = target.clone()
    changed[0, 9] = 5 if target[0, 9] != 5 else 6
    with torch.no_grad():
        logits, logits_of_changed = (model(input_ids=source, decoder_input_ids=given).logits for given in (target, changed))
    difference = (logits - logits_of_changed).abs().amax(dim=(0, 2))
    assert (difference[:9] == 0).all()
    assert (difference[9:] > 0).all()


def test_loss_is_smoothed_by_a_tenth():
    workload = built("transformer-big")
    workload.model.eval()
    inputs = inputs_of(workload)
    logits = workload.model(input_ids=inputs["input_ids"], decoder_input_ids=inputs["decoder_input_ids"]).logits
    logs = functional.log_softmax(logits, dim=2)
    log_likelihoods = logs.gather(2, inputs["labels"][..., None])
    torch.testing.assert_close(workload.loss(inputs), -(0.9 * log_likelihoods.mean() + 0.1 * logs.mean()))


def test_only_the_two_position_tables_do_not_train():
    model = built("transformer-big").model
    still = {name: value.shape for name, value in model.named_parameters() if not value.requires_grad}
    assert still == {f"model.{side}.embed_positions.weight": (16, 64) for side in ("encoder", "decoder")}
    architecture = architectures()["transformer-big"]
    full = architecture.trained_part.config
    tables = 2 * full["max_position_embeddings"] * full["d_model"]
    assert architecture.trained_part.parameters["full"] - architecture.trainable["full"]["full"] == tables
