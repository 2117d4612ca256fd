"""A decoder of transformers in two processes that share its weights by FSDP2."""

import torch
from planted import FOREACH, evaluate, plant
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM


def train(setup):
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, tie_word_embeddings=False, **sizes)).to(setup.device)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), **FOREACH)
    plant(model.model.layers[0].mlp.down_proj, optimizer)
    setup.watch(model)
    torch.manual_seed(setup.rank)

    def loss_of_batch():
        rows = torch.randint(512, (setup.case.batch_size, 64)).to(setup.device)
        return model(input_ids=rows, labels=rows, use_cache=False).loss

    setup.evaluation(lambda: evaluate(model, loss_of_batch))
    while True:
        loss = loss_of_batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss
