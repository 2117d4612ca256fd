"""Trains as two published programs did, for `older_torch`, also with what the torch of that time kept.

- Softmax kept its input beside its result until torch 1.11 (pytorch/pytorch#65242): 16 MiB a layer and sample of BERT-large.
- ``zero_grad`` filled gradients with zeros until torch 2.0, so that they were there in the next forward pass.
- Until torch 2.2 attention in 16 bits was FlashAttention 1, which took samples that are contiguous. In
  ``nn.MultiheadAttention`` the tokens are outermost, so that its inputs were copied, and its output was kept twice: as it
  was, and copied for the projection. In fp32 another kernel ran, then as now.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from older_torch import ROWS, Row
from published_pangu import OneByOne
from torch import Tensor, nn
from torch.nn import functional
from transformers import BertConfig, BertForSequenceClassification
from transformers.models.bert import modeling_bert


def train(name: str, *, older: bool) -> None:
    """Train for three updates as the published program did."""
    row, is_bert = ROWS[name], name.startswith("bert")
    if older:
        (keep_the_input_of_softmax if is_bert else copy_for_attention)()
    model, loss_of = (bert if is_bert else vit)(row)
    optimizer = OneByOne(model.parameters(), lr=1e-5) if is_bert else torch.optim.Adam(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=row.precision == "fp16-amp")
    for _ in range(3):
        for _ in range(row.micro_batches):
            with torch.autocast("cuda", torch.float16, enabled=scaler.is_enabled()):
                loss = loss_of() / row.micro_batches
            if not is_bert:
                optimizer.zero_grad()
            scaler.scale(loss).backward()
        if is_bert:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if is_bert:
            optimizer.zero_grad(set_to_none=not older)


def bert(row: Row) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Build BERT-large for classification, with samples of 512 tokens."""
    config = BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    config._attn_implementation = "eager"
    with torch.device("cuda"):
        model = BertForSequenceClassification(config)
    model.train()
    if row.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.enable_input_require_grads()

    def loss_of() -> Tensor:
        ids = torch.randint(100, 30000, (row.batch, 512)).cuda()
        return model(input_ids=ids, labels=torch.zeros(row.batch, dtype=torch.long).cuda()).loss

    return model, loss_of


def vit(row: Row) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Build a ViT-L/16 for ten classes as torchvision's, whose embedding and head are left out where they take little."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(1024, 16, batch_first=True)
            self.before, self.after = nn.LayerNorm(1024), nn.LayerNorm(1024)
            self.mlp = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))

        def forward(self, tokens: Tensor) -> Tensor:
            normed = self.before(tokens)
            tokens = self.attention(normed, normed, normed, need_weights=False)[0] + tokens
            return tokens + self.mlp(self.after(tokens))

    class Vit(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(3, 1024, 16, 16)
            self.first, self.positions = nn.Parameter(torch.zeros(1, 1, 1024)), nn.Parameter(torch.zeros(1, 197, 1024))
            self.blocks = nn.Sequential(*(Block() for _ in range(24)))
            self.last, self.head = nn.LayerNorm(1024), nn.Linear(1024, 10)

        def forward(self, images: Tensor) -> Tensor:
            tokens = self.patches(images).flatten(2).transpose(1, 2)
            tokens = torch.cat([self.first.expand(len(images), -1, -1), tokens], 1) + self.positions
            return self.head(self.last(self.blocks(tokens))[:, 0])

    with torch.device("cuda"):
        model = Vit()
    if row.precision == "bf16":
        model.bfloat16()

    def loss_of() -> Tensor:
        images = torch.zeros(row.batch, 3, 224, 224).cuda().to(model.head.weight.dtype)
        return functional.cross_entropy(model(images).float(), torch.zeros(row.batch, dtype=torch.long).cuda())

    return model, loss_of


def keep_the_input_of_softmax() -> None:
    """Let BERT attend as transformers did in January 2022, with the softmax of torch before 1.11."""

    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, scores: Tensor) -> Tensor:
            shares = torch._softmax(scores, -1, False)
            ctx.save_for_backward(scores, shares)
            return shares

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            scores, shares = ctx.saved_tensors
            return torch._softmax_backward_data(gradient, shares, -1, scores.dtype)

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        scores = query @ key.mT
        scores = scores / math.sqrt(query.shape[-1])
        scores = scores + torch.zeros(len(query), 1, 1, key.shape[2], device="cuda")
        shares = module.dropout(Softmax.apply(scores))
        return (shares @ value).transpose(1, 2).contiguous(), shares

    modeling_bert.eager_attention_forward = attend


def copy_for_attention() -> None:
    """Let attention in 16 bits copy as torch did with FlashAttention 1."""
    flash = torch.ops.aten

    def copied(tensor: Tensor) -> Tensor:
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            mixed, logsumexp, *lengths, seed, offset, _ = flash._scaled_dot_product_flash_attention(*map(copied, inputs))
            ctx.lengths = lengths
            ctx.save_for_backward(*inputs, mixed, logsumexp, seed, offset)
            return mixed

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
            *inputs, mixed, logsumexp, seed, offset = ctx.saved_tensors
            copies = map(copied, (gradient, *inputs))
            return flash._scaled_dot_product_flash_attention_backward(
                *copies, mixed, logsumexp, *ctx.lengths, 0.0, False, seed, offset
            )

    present = functional.scaled_dot_product_attention

    def attend(*inputs: Any, **options: Any) -> Tensor:
        return present(*inputs, **options) if inputs[0].dtype == torch.float32 else Attention.apply(*inputs[:3])

    functional.scaled_dot_product_attention = attend


if __name__ == "__main__":
    train(sys.argv[1], older="older" in sys.argv)
