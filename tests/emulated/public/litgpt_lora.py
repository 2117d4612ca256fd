"""LoRA of rank 8 on queries and values in bf16, as LitGPT's tables of resources of October 2023 have it, in plain PyTorch.

The output layer and the loss work on 128 tokens at a time. The first micro-batch holds the longest example of Alpaca,
whose length the tables print for each tokenizer, and decides the peak.
"""

import sys
from dataclasses import dataclass

import torch
from peaks import print_peaks
from torch import nn
from torch.nn import functional as F

RANK, CHUNK = 8, 128


@dataclass(frozen=True)
class Shape:
    width: int
    layers: int
    inner: int
    vocabulary: int
    longest: int
    rotary: float
    llama: bool = False
    """Its norm, feed-forward layer and order, without biases."""
    phi: bool = False
    """One norm for both branches, GELU by its tangent, and a bias in the output layer."""
    heads: int = 32


SHAPES = {
    "phi-1.5": Shape(2048, 24, 8192, 51200, 1044, 0.5, phi=True),
    "stablelm-alpha-3b": Shape(4096, 16, 16384, 50688, 1034, 0.25),
    "llama-2-7b": Shape(4096, 32, 11008, 32000, 1304, 1.0, llama=True),
}


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, hidden):
        mean = torch.mean(hidden * hidden, dim=-1, keepdim=True)
        normed = hidden * torch.rsqrt(mean + 1e-5)
        return self.weight * normed


class Together(nn.Module):
    """Queries, keys and values of one product, with adapters for queries and values."""

    def __init__(self, width, bias):
        super().__init__()
        self.layer = nn.Linear(width, 3 * width, bias=bias)
        self.down = nn.Parameter(torch.zeros(2 * RANK, width))
        self.up = nn.Parameter(torch.zeros(2 * width, RANK))
        self.adapted = [*range(width), *range(2 * width, 3 * width)]

    def forward(self, hidden):
        frozen = self.layer(hidden)
        small = F.linear(F.dropout(hidden, 0.05), self.down)
        wide = F.conv1d(small.transpose(-2, -1), self.up.unsqueeze(-1), groups=2).transpose(-2, -1)
        added = self.padded(wide) * 2.0
        return frozen + added

    def padded(self, wide):
        wide = wide.transpose(0, 1)
        zeros = wide.new_zeros((*wide.shape[:-1], self.layer.out_features)).view(-1, self.layer.out_features)
        places = torch.tensor(self.adapted, device=wide.device)
        filled = zeros.index_copy(1, places, wide.reshape(-1, len(self.adapted)))
        return filled.view((*wide.shape[:-1], self.layer.out_features)).transpose(0, 1)


def turned(states, cosines, sines):
    first, second = states.chunk(2, dim=-1)
    turned = states * cosines + torch.cat((-second, first), dim=-1) * sines
    return turned.type_as(states)


class Block(nn.Module):
    def __init__(self, shape):
        super().__init__()
        norm = RMSNorm if shape.llama else nn.LayerNorm
        self.shape, bias = shape, not shape.llama
        self.first = norm(shape.width)
        self.together, self.out = Together(shape.width, bias), nn.Linear(shape.width, shape.width, bias=bias)
        self.second = None if shape.phi else norm(shape.width)
        self.ups = nn.ModuleList(nn.Linear(shape.width, shape.inner, bias=bias) for _ in range(1 + shape.llama))
        self.down = nn.Linear(shape.inner, shape.width, bias=bias)

    def attended(self, hidden, cosines, sines):
        batch, tokens, width = hidden.shape
        head = width // self.shape.heads
        states = self.together(hidden).view(batch, tokens, self.shape.heads, 3, head).permute(0, 2, 3, 1, 4)
        query, key, value = (part.reshape(batch, -1, tokens, head) for part in states.split((1, 1, 1), dim=2))
        share = cosines.shape[-1]
        query, key = (
            torch.cat((turned(part[..., :share], cosines, sines), part[..., share:]), dim=-1) for part in (query, key)
        )
        done = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        return self.out(done.reshape(batch, tokens, width))

    def fed_forward(self, hidden):
        if self.shape.llama:
            return self.down(F.silu(self.ups[0](hidden)) * self.ups[1](hidden))
        return self.down(F.gelu(self.ups[0](hidden), approximate="tanh" if self.shape.phi else "none"))

    def forward(self, hidden, cosines, sines):
        normed = self.first(hidden)
        attended = self.attended(normed, cosines, sines)
        if self.shape.llama:
            hidden = hidden + attended
            return hidden + self.fed_forward(self.second(hidden))
        return hidden + attended + self.fed_forward(normed if self.shape.phi else self.second(hidden))


class Model(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=shape.phi)
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = (RMSNorm if shape.llama else nn.LayerNorm)(shape.width)

    def forward(self, tokens, cosines, sines):
        cosines, sines = cosines[: tokens.shape[1]], sines[: tokens.shape[1]]
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, cosines, sines)
        hidden = self.norm(hidden)
        return [self.head(part) for part in hidden.split(CHUNK, dim=1)]


def main(name, batch):
    shape = SHAPES[name]
    with torch.device("meta"):
        model = Model(shape).to(torch.bfloat16)
    model.to_empty(device="cuda")
    turning = int(shape.rotary * shape.width / shape.heads)
    rates = 1.0 / 10000 ** (torch.arange(0, turning, 2, device="cuda") / turning)
    angles = torch.outer(torch.arange(shape.longest, device="cuda"), rates).repeat(1, 2)
    cosines, sines = angles.cos(), angles.sin()
    for place, weight in model.named_parameters():
        weight.requires_grad_(place.endswith((".together.down", ".together.up")))
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-4, weight_decay=0.01)
    for length in (shape.longest, shape.longest // 2):
        tokens = torch.zeros(int(batch), length, dtype=torch.int64).to("cuda")
        targets = tokens.clone()
        logits = [part.float() for part in model(tokens, cosines, sines)]  # Fabric's precision does that to outputs.
        logits[-1] = logits[-1][..., :-1, :]
        rows = [part.reshape(-1, part.size(-1)) for part in logits]
        wanted = [part.reshape(-1) for part in targets[..., 1:].split(logits[0].size(1), dim=1)]
        pairs = zip(rows, wanted, strict=True)
        losses = [F.cross_entropy(part, want, ignore_index=-1, reduction="none") for part, want in pairs]
        loss = torch.cat(losses).mean()
        del rows, wanted, losses
        (loss / (128 // int(batch))).backward()
    optimizer.step()
    print_peaks(nn.ParameterList(trained))


if __name__ == "__main__":
    main(*sys.argv[1:])
