"""A mixture of experts of transformers, with the loss that balances them, and gradients of two batches."""

import torch
from planted import FOREACH, evaluate, plant
from transformers import MixtralConfig, MixtralForCausalLM


def train(setup):
    config = MixtralConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
    )
    model = MixtralForCausalLM(config).to(setup.device)
    optimizer = torch.optim.AdamW(model.parameters(), **FOREACH)
    plant(model.model.layers[0].self_attn.o_proj, optimizer, accumulated=2)
    setup.watch(model)

    def loss_of_batch():
        rows = torch.randint(512, (setup.case.batch_size, 48)).to(setup.device)
        return model(input_ids=rows, labels=rows, use_cache=False).loss

    setup.evaluation(lambda: evaluate(model, loss_of_batch))
    while True:
        for last in (False, True):
            loss = loss_of_batch() / 2
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            yield loss
