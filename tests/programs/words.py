"""A decoder of x-transformers on rows of random words."""

import torch
from planted import FOREACH, evaluate, plant
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper


def train(setup):
    layers = Decoder(dim=64, depth=2, heads=2, attn_dim_head=32, rotary_pos_emb=True)
    model = AutoregressiveWrapper(TransformerWrapper(num_tokens=256, max_seq_len=64, attn_layers=layers)).to(setup.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **FOREACH)
    plant(model.net.to_logits, optimizer)
    setup.watch(model)

    def loss_of_batch():
        return model(torch.randint(256, (setup.case.batch_size, 65)).to(setup.device))

    setup.evaluation(lambda: evaluate(model, loss_of_batch))
    while True:
        loss = loss_of_batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss
