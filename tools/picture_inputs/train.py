"""Trains Llama 3.2 1B from random weights: as a language model, and as a classifier."""

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

CONFIG = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    tie_word_embeddings=True,
    pad_token_id=0,
    num_labels=2,
)


def finetune(device, batch_size, steps=4):
    model = LlamaForCausalLM(CONFIG).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(steps):
        tokens = torch.randint(1, 128256, (batch_size, 2049), device=device)
        logits = model(tokens[:, :-1]).logits.flatten(0, 1)
        loss = cross_entropy(logits, tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield model, loss


def classify(device, batch_size, steps=4):
    model = LlamaForSequenceClassification(CONFIG).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for _ in range(steps):
        tokens = torch.randint(1, 128256, (batch_size, 2048), device=device)
        loss = model(tokens, labels=torch.randint(2, (batch_size,), device=device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield model, loss


if __name__ == "__main__":
    for _ in finetune("cuda", batch_size=4):
        pass
