"""Fine-tuning of timm's vision transformers with optimizers of 8 and 4 bits, as torchao's benchmark does."""

import argparse

import timm
import torch
from peaks import print_peaks
from torch.nn import functional

UPDATES = 3
SIZE = 224
"""Of an image in pixels."""


def optimizer_of(name, weights):
    """Build an optimizer. Blocks of 2,048 were the default of torchao's first one, and are 256 today."""
    if name == "torch":
        return torch.optim.Adam(weights)
    if name == "fused":
        return torch.optim.AdamW(weights, fused=True, weight_decay=0)
    if name == "bnb8":
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(weights, weight_decay=0)
    from torchao.optim import Adam8bit, AdamW4bit, AdamW8bit, AdamWFp8

    if name == "ao8-2048":
        return Adam8bit(weights, block_size=2048)
    return {"ao8": AdamW8bit, "ao4": AdamW4bit, "aofp8": AdamWFp8}[name](weights, weight_decay=0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("batch", type=int)
    parser.add_argument("optimizer", choices=["torch", "fused", "bnb8", "ao8-2048", "ao8", "aofp8", "ao4"])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--bf16", action="store_true", help="weights, in place of autocasting")
    parser.add_argument("--checkpointing", action="store_true")
    asked = parser.parse_args()

    with torch.device("meta"):
        model = timm.create_model(asked.model, num_classes=45, img_size=SIZE)
    model.set_grad_checkpointing(asked.checkpointing)
    if asked.bf16:
        model.bfloat16()
    model.to_empty(device="cuda").train()
    if asked.compile:
        model.compile(fullgraph=True)
    optimizer = optimizer_of(asked.optimizer, model.parameters())
    for _ in range(UPDATES):
        images = torch.randn(asked.batch, 3, SIZE, SIZE)
        if asked.bf16:
            images = images.bfloat16()
        with torch.autocast("cuda", torch.bfloat16, enabled=not asked.bf16):
            loss = functional.cross_entropy(model(images.cuda()), torch.randint(45, (asked.batch,)).cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print_peaks(model)


if __name__ == "__main__":
    main()
