"""Models of several families: what they have in common, and what each of them is trained on."""

import math
import re
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional
from zoo_examples import METHODS_OF_MODELS, STATED, built, example, inputs_of, measured, refused, trained

from pytest_gputrain.cases.architectures.facts import architectures
from pytest_gputrain.records.case import KNOBS
from pytest_gputrain.worker.flops import count_flops

WITH_POSITIONS = {"pangu-350m": 1024, "bert-large": 512, "transformer-big": 256}
"""Models by the length of their table of positions at full size."""
GENERATING = [name for name, architecture in STATED.items() if "diffusion" in architecture.family]


@pytest.mark.parametrize(("name", "positions"), WITH_POSITIONS.items())
def test_a_sample_longer_than_the_table_of_positions_is_told_at_any_scale(name, positions):
    assert refused(example(name, sequence_length=positions + 1)) == (
        f"{name} has a table of {positions:,} positions, too few for sequence_length={positions + 1}; "
        f"set it to at most {positions}"
    )


@pytest.fixture
def doubles():
    """Arithmetic in which rounding is far below any gradient: a bias of all keys gets nothing but rounding."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


# No method trains LLaVA's tower, and word2vec's contexts begin at zero.
@pytest.mark.parametrize("name", [name for name in STATED if not name.startswith(("llava", "word2vec"))])
@pytest.mark.usefixtures("doubles")
def test_idle_parameters_are_exactly_those_without_a_gradient(name):
    workload = built(name)
    workload.loss(inputs_of(workload)).backward()
    gradients = {key: value.grad for key, value in workload.model.named_parameters() if value.requires_grad}
    norms = {key: 0.0 if gradient is None else float(gradient.norm()) for key, gradient in gradients.items()}
    without = {key for key, norm in norms.items() if norm < 1e-14 * max(norms.values())}
    assert without == {key for key, norm in norms.items() if norm < 1e-8 * max(norms.values())}, "a gradient in doubt"
    patterns = architectures()[name].idle.get("tiny", ())
    assert without == {key for key in norms if any(re.fullmatch(pattern, key) for pattern in patterns)}


@pytest.mark.parametrize("name", GENERATING)
def test_every_step_trains_on_the_same_noise_and_time(name):
    workload = built(name)
    inputs = inputs_of(workload)
    assert torch.equal(workload.loss(inputs), workload.loss(inputs))


PRODUCTS = {"bert-large": 6}
"""Of attention, forward and backward. Two are forward; backward has four gradients and the scores again, unless dropout has
the weights kept, as on a CPU."""
BY_OTHER_MEANS = ("gemma-2-9b", "pangu-350m", "pangu-2.6b", "mochi-1", "word2vec")
"""Models with products outside of layers and torch's attention."""
COUNTED = {(STATED[name].trained_part.model_class, method): name for name, method in METHODS_OF_MODELS if method != "qlora"}


@pytest.mark.parametrize(
    ("name", "method"), [(name, method) for (_, method), name in COUNTED.items() if name not in BY_OTHER_MEANS]
)
def test_flops_are_those_of_layers_and_attention(name, method):
    """A layer's product is there once more for each gradient that is wanted: of its input, and of its weights."""
    training = trained(example(name, method, precision="fp32"))
    flops, attend = [], functional.scaled_dot_product_attention

    def layer(module, arguments, output):
        wanted = [arguments[0].requires_grad, module.weight.requires_grad] if torch.is_grad_enabled() else []
        flops.append((1 + sum(wanted)) * 2 * output.numel() * module.weight[0].numel())

    def attention(query, key, *others, **options):
        products = PRODUCTS.get(name, 7) if query.requires_grad and torch.is_grad_enabled() else 2
        flops.append(products * 2 * query.numel() * key.shape[-2])
        return attend(query, key, *others, **options)

    for module in training.model.modules():
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
            module.register_forward_hook(layer)
    with mock.patch.object(functional, "scaled_dot_product_attention", attention), count_flops() as counted:
        training.step(True)
    assert counted.total == sum(flops) > 0


@pytest.mark.parametrize("precision", ["fp32", "bf16-amp", "fp16-amp"])
@pytest.mark.parametrize(
    "name", [*WITH_POSITIONS, "resnet-50", "vgg-16", "word2vec", "ctr-dnn", "wide-deep", "llava-1.6-13b", "qwen2-vl-2b"]
)
def test_every_precision_trains_every_family(name, precision):
    assert measured(example(name, precision=precision, steps=1, warmup=1)).updates >= 2


# Transformer big: an encoder and a decoder with one table


def test_the_decoder_sees_the_targets_one_late_and_no_token_is_padding():
    inputs = inputs_of(built("transformer-big", batch_size=64, sequence_length=9))
    source, late, target = (inputs[name] for name in ("input_ids", "decoder_input_ids", "labels"))
    assert source.shape == late.shape == target.shape == (64, 9)
    assert (late[:, 0] == 1).all()
    assert torch.equal(late[:, 1:], target[:, :-1])
    assert (source > 1).all()
    assert (target > 1).all()
    assert not torch.equal(source, target)


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


# BERT-large: masked tokens and next sentences


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


# ResNet-50 and VGG-16


@pytest.mark.parametrize("name", ["resnet-50", "vgg-16"])
def test_resolution_is_width_by_height_and_labels_are_classes_of_the_model(name):
    inputs = inputs_of(built(name, resolution="31x16", batch_size=500))
    assert inputs["images"].shape == (500, 3, 16, 31)
    assert set(inputs["labels"].tolist()) == set(range(10))


@pytest.mark.parametrize(("name", "features"), [("resnet-50", (2048, 7, 7)), ("vgg-16", (512, 7, 7))])
def test_published_images_leave_seven_by_seven_features(name, features):
    model = built(name, "full", "meta").model
    images = torch.empty(1, 3, 224, 224, device="meta")
    maps = model.resnet(images).last_hidden_state if name == "resnet-50" else model.features[:-2](images)
    assert maps.shape == (1, *features)


def test_vgg_passes_its_signal_on_from_the_start():
    workload = built("vgg-16", batch_size=64)
    workload.model.eval()
    logits = workload.model(inputs_of(workload)["images"])
    # From torch's own start it is 1e-7.
    assert logits.std(dim=0).mean() > 1e-3
    # Weights of the linear layers that are scaled as the convolutions' gave 1.5, and at full size a loss of nan.
    assert logits.std() < 0.5


# word2vec on sparse gradients, CTR-DNN and wide & deep


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
    reply = measured(example("word2vec", precision="fp32"))
    assert reply.peak_allocated_bytes < 1.2 * 4 * reply.parameters
    assert reply.flops_per_step == 3 * 2 * reply.batch_size * 6 * 32


@pytest.mark.parametrize("optimizer", [name for name in KNOBS["optimizer"].words if name != "sgd"])
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


# PanGu: a GPT with a query layer, by a module of our own


@pytest.mark.parametrize(("name", "checkpoint_megabytes"), [("pangu-350m", 659), ("pangu-2.6b", 5010)])
def test_the_count_is_that_of_the_published_checkpoint(name, checkpoint_megabytes):
    """Stored in fp16, as the repository of the benchmark tells its size (2.6B: half of 9.8 GB in fp32)."""
    stored = 2 * architectures()[name].trained_part.parameters["full"] / 2**20
    assert stored == pytest.approx(checkpoint_megabytes, rel=2e-3)


def naive_logits(model, ids, heads):
    """The network written down once more, with attention as a tensor of scores."""
    length = ids.shape[1]
    later = torch.ones(length, length).triu(1).bool()

    def split(states):
        return states.view(*states.shape[:2], heads, -1).permute(0, 2, 1, 3)

    hidden = model.wte.weight[ids] + model.wpe.weight[:length]
    for index, block in enumerate(model.blocks):
        is_query_layer = index == len(model.blocks) - 1
        if is_query_layer:
            hidden = model.ln_f(hidden)
        states = block.ln_1(hidden)
        attention = block.attention
        source = model.wqe.weight[:length].expand_as(hidden) if is_query_layer else states
        query, key, value = (
            split(layer(of))
            for layer, of in [(attention.q_proj, source), (attention.k_proj, states), (attention.v_proj, states)]
        )
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
        mixed = scores.masked_fill(later, -math.inf).softmax(dim=3) @ value
        hidden = hidden + attention.c_proj(mixed.permute(0, 2, 1, 3).reshape(hidden.shape))
        hidden = hidden + block.mlp.c_proj(functional.gelu(block.mlp.c_fc(block.ln_2(hidden))))
    return hidden @ model.wte.weight.T


def test_logits_are_those_of_the_network_written_down_naively():
    model = built("pangu-350m").model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        ids = torch.randint(0, 512, (2, 30))
        torch.testing.assert_close(model(ids), naive_logits(model, ids, heads=4))


def test_dropout_is_on_in_attention_embeddings_and_both_outputs():
    model = built("pangu-350m").model
    states = torch.randn(1, 8, 64)
    ids = torch.zeros(1, 8, dtype=torch.int64)
    for part, given in [(model.blocks[0].attention, states), (model.blocks[0].mlp, states), (model, ids)]:
        assert not torch.equal(part(given), part(given))
    attention = model.blocks[0].attention
    attention.dropout.eval()  # what is dropped of the weights remains
    assert not torch.equal(attention(states), attention(states))


def test_a_fresh_model_knows_nothing_and_layers_that_end_in_the_residual_start_smaller_with_depth():
    workload = built("pangu-350m")
    assert workload.loss(inputs_of(workload)).item() == pytest.approx(math.log(512), rel=0.05)
    deviations = {name: value.std().item() for name, value in workload.model.named_parameters() if value.ndim > 1}
    assert deviations.pop("wqe.weight") == pytest.approx(0.02, rel=0.1)
    ends = [value for name, value in deviations.items() if "c_proj" in name]
    assert ends == pytest.approx([0.02 / math.sqrt(2 * 3)] * 6, rel=0.1)
