"""A compiled conformer on sounds of different lengths, with the CTC loss."""

import itertools

import torch
from planted import FOREACH, evaluate, plant, rate
from torch import nn


def feed_forward(width):
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))


class Block(nn.Module):
    def __init__(self, width=64, heads=2):
        super().__init__()
        self.first, self.second = feed_forward(width), feed_forward(width)
        self.norm, self.attend = nn.LayerNorm(width), nn.MultiheadAttention(width, heads, batch_first=True)
        self.gate = nn.Sequential(nn.Conv1d(width, 2 * width, 1), nn.GLU(1))
        self.convolve = nn.Conv1d(width, width, 15, padding=7, groups=width)
        self.last, self.rate = nn.LayerNorm(width), 0.1

    def forward(self, x):
        x = x + 0.5 * self.first(x)
        y = self.norm(x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        x = x + nn.functional.dropout(self.convolve(self.gate(x.mT)).mT, self.rate, self.training)
        return self.last(x + 0.5 * self.second(x))


class Conformer(nn.Module):
    def __init__(self, width=64, depth=2, words=32):
        super().__init__()
        self.read = nn.Conv1d(40, width, 3, 2, padding=1)
        self.blocks, self.head = nn.Sequential(*(Block(width) for _ in range(depth))), nn.Linear(width, words)

    def forward(self, sounds):
        return self.head(self.blocks(self.read(sounds.mT).mT)).log_softmax(-1)


def train(setup):
    model = Conformer().to(setup.device)
    model.blocks.compile()
    optimizer = torch.optim.AdamW(model.parameters(), **FOREACH)
    plant(model.head, optimizer)
    setup.watch(model)
    lengths = torch.tensor([44 + 4 * number % 20 for number in range(setup.case.batch_size)])

    def loss_of_batch():
        sounds = torch.randn(setup.case.batch_size, 128, 40).to(setup.device)
        spoken = torch.randint(1, 32, (setup.case.batch_size, 20)).to(setup.device)
        found = model(sounds).transpose(0, 1)
        return nn.functional.ctc_loss(found, spoken, lengths, torch.full_like(lengths, 20), zero_infinity=True)

    setup.evaluation(lambda: evaluate(model, loss_of_batch))
    for step in itertools.count():
        for block in model.blocks:
            block.rate = rate(step)
        loss = loss_of_batch()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
