"""Training steps of adapters of PEFT on a small Llama, with random weights."""

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

TARGETS = ["q_proj", "v_proj", "down_proj"]
ADAPTERS = {
    "lora": ("LoraConfig", {"r": 8, "lora_dropout": 0.1}),
    "dora": ("LoraConfig", {"r": 8, "use_dora": True}),
    "adalora": ("AdaLoraConfig", {"total_step": 100}),
    "lokr": ("LoKrConfig", {"r": 8}),
    "oft": ("OFTConfig", {"r": 8, "oft_block_size": 0}),
    "vera": ("VeraConfig", {"r": 8}),
    "ia3": ("IA3Config", {"feedforward_modules": ["down_proj"]}),
}


def train(setup, kind, layers=2):
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=1024, num_hidden_layers=layers, **shape))
    config, options = ADAPTERS[kind]
    model = peft.get_peft_model(model, getattr(peft, config)(target_modules=TARGETS, **options)).to(setup.device)
    optimizer = torch.optim.AdamW([value for value in model.parameters() if value.requires_grad])
    tokens = torch.randint(1024, (2, 64), device=setup.device)
    while True:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters(gputrain, kind):
    gputrain.check(train, precision="fp32", batch_size=2, args={"kind": kind})


def test_a_deep_model(gputrain):
    gputrain.check(train, precision="fp32", batch_size=2, args={"kind": "lora", "layers": 24})
