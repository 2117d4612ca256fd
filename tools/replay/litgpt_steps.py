"""Training steps of models of litgpt, with random weights."""

import pytest
import torch
from litgpt import GPT, Config, lora

SMALL = {"n_layer": 4, "n_embd": 256, "n_head": 8, "block_size": 256, "padded_vocab_size": 1024}
CONFIGS = {
    "pythia-14m": SMALL,
    "Llama-3.2-1B": SMALL | {"n_query_groups": 4, "intermediate_size": 512, "head_size": 32},
    "Gemma-2-2b": SMALL | {"n_query_groups": 4, "intermediate_size": 512, "head_size": 32, "sliding_window_size": 64},
    "Mixtral-8x7B-v0.1": SMALL | {"n_query_groups": 4, "intermediate_size": 512, "head_size": 32, "n_expert": 4},
}


def train(setup, name, kind="full", layers=4):
    shape = CONFIGS[name] | {"n_layer": layers}
    if kind == "lora":
        ranks = {"lora_r": 8, "lora_query": True, "lora_value": True, "lora_projection": True}
        model = lora.GPT(lora.Config.from_name(name, **shape, **ranks)).to(setup.device)
        lora.mark_only_lora_as_trainable(model)
    else:
        model = GPT(Config.from_name(name, **shape)).to(setup.device)
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad])
    tokens = torch.randint(1024, (2, 128), device=setup.device)
    while True:
        loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("name", CONFIGS)
def test_models(gputrain, name):
    gputrain.check(train, precision="fp32", batch_size=2, args={"name": name})


def test_adapters(gputrain):
    gputrain.check(train, precision="fp32", batch_size=2, args={"name": "Llama-3.2-1B", "kind": "lora"})


def test_a_deep_model(gputrain):
    gputrain.check(train, precision="fp32", batch_size=2, args={"name": "Llama-3.2-1B", "layers": 32})
