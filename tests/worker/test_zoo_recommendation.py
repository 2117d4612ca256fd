"""The recommendation models: word2vec on sparse gradients, CTR-DNN and wide & deep."""

import math

import pytest
import torch
from torch.nn import functional
from zoo_examples import built, example, inputs_of, measured, refused, trained

from pytest_gputrain.cases.validation import OPTIMIZERS


def test_gradients_of_word2vec_are_sparse_and_touch_only_what_was_seen():
    training = trained(example("word2vec", precision="fp32"))
    before = {name: value.clone() for name, value in training.model.named_parameters()}
    training.step(False)
    assert all(value.grad.is_sparse for value in training.model.parameters())
    training.step(True)
    training.step(True)  # words stand still in the first update: contexts begin at zero
    seen = {name: set(training._inputs[name].flatten().tolist()) for name in ("words", "candidates")}
    for name, value in training.model.named_parameters():
        moved = set((value != before[name]).any(dim=1).nonzero().flatten().tolist())
        assert moved == seen["words" if name == "words.weight" else "candidates"]


def test_loss_of_word2vec_is_of_one_true_and_five_false_contexts():
    workload = built("word2vec", batch_size=7)
    inputs = inputs_of(workload)
    assert workload.loss(inputs).item() == pytest.approx(6 * math.log(2))  # contexts begin at zero
    model = workload.model
    with torch.no_grad():
        model.contexts.weight.normal_()
        model.biases.weight.normal_()
        total = 0.0
        for word, candidates in zip(inputs["words"], inputs["candidates"], strict=True):
            for index, candidate in enumerate(candidates):
                logit = model.words.weight[word] @ model.contexts.weight[candidate] + model.biases.weight[candidate, 0]
                total -= functional.logsigmoid(logit if index == 0 else -logit).item()
        assert workload.loss(inputs).item() == pytest.approx(total / 7)


def test_word2vec_allocates_no_dense_gradient_and_its_flops_are_those_of_its_products():
    reply = measured(example("word2vec", precision="fp32", batch_size=100))
    assert reply.peak_allocated_bytes < 1.2 * 4 * reply.parameters
    assert reply.flops_per_step == 3 * 2 * 100 * 6 * 32


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name != "sgd"])
def test_word2vec_names_the_optimizer_that_takes_sparse_gradients(optimizer):
    sentence = refused(example("word2vec", optimizer=optimizer))
    assert f"sparse gradients, which the optimizer {optimizer!r} does not take; choose optimizer='sgd'" in sentence


def test_all_slots_share_one_table():
    model = built("ctr-dnn").model
    assert model.table.weight.shape == (1009, 10)
    seen = []
    model.layers[0].register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    dense = torch.rand(1, 13)
    model(torch.full((1, 26), 5), dense)
    assert torch.equal(seen[0], torch.cat([model.table.weight[5].repeat(26)[None], dense], dim=1))


def test_the_wide_part_is_linear_in_ids_and_dense_features():
    model = built("wide-deep").model
    ids, dense = torch.arange(26)[None], torch.rand(1, 13)
    with torch.no_grad():
        torch.testing.assert_close(model(ids, dense), model.deep(ids, dense))  # it begins at zero
        model.wide_ids.weight[3:5] = 2.0
        model.wide_dense.weight[0, 7] = 10.0
        torch.testing.assert_close(model(ids, dense), model.deep(ids, dense) + 2 * 2.0 + 10 * dense[:, 7:8])


def test_one_output_or_two_tell_the_same_of_a_click():
    workload = built("wide-deep", batch_size=50)
    inputs = inputs_of(workload)
    logits = workload.model(inputs["ids"], inputs["dense"])
    two = torch.cat([torch.zeros_like(logits), logits], dim=1)
    torch.testing.assert_close(workload.loss(inputs), functional.cross_entropy(two, inputs["clicks"]))
    workload = built("ctr-dnn", batch_size=50)
    logits = workload.model(inputs["ids"], inputs["dense"])
    torch.testing.assert_close(workload.loss(inputs), functional.cross_entropy(logits, inputs["clicks"]))
    assert 0.05 < logits.std() < 5, "a fresh tower neither explodes nor dies"
