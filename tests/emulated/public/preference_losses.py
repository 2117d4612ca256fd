"""Losses of preference tuning, and cross-entropy, with their output layer, in the PyTorch that Liger Kernel compares with.

Each has a forward and a backward pass in bf16 whose logits become fp32, twice without cleared gradients. The output
layers of Liger Kernel's own implementation lie on the GPU as well, as in its benchmarks.
"""

import sys

import torch
from peaks import print_peaks
from torch import nn
from torch.nn import functional as F

VOCABULARY = 128256
WIDTH = 4096
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def output_layer(width=WIDTH, bias=False):
    return nn.Linear(width, VOCABULARY, bias=bias, **BF16)


class GRPO(nn.Module):
    """Of a group of sequences of 1,024 tokens with a reference model."""

    def __init__(self, batch):
        super().__init__()
        self.layer, self.reference = output_layer(), output_layer()
        self.others = nn.ModuleList([output_layer(), output_layer()])
        self.states = torch.randn(batch, 1024, WIDTH, requires_grad=True, **BF16)
        self.chosen = torch.randint(0, VOCABULARY, (batch, 1024), device="cuda")
        self.mask = torch.ones(batch, 1024, device="cuda")
        self.advantages = torch.randn(batch, **BF16)
        self.of_reference = torch.randn(batch, 1024, WIDTH, **BF16)

    def of_chosen(self, probabilities):
        return probabilities.gather(dim=-1, index=self.chosen.unsqueeze(-1)).squeeze(-1)

    def forward(self):
        logits = self.states @ self.layer.weight.t()
        probabilities = F.log_softmax(logits.float(), dim=-1)
        chosen = self.of_chosen(probabilities)
        with torch.no_grad():
            of_reference = self.of_reference @ self.reference.weight.t()
            reference_probabilities = F.log_softmax(of_reference.float(), dim=-1)
            reference = self.of_chosen(reference_probabilities)
        ratio = torch.exp(chosen - chosen.detach())
        clipped = torch.clamp(ratio, 0.8, 1.2)
        losses = -torch.min(ratio * self.advantages.unsqueeze(1), clipped * self.advantages.unsqueeze(1))
        losses = losses + 0.1 * (torch.exp(reference - chosen) - (reference - chosen) - 1.0)
        return (losses * self.mask).sum() / torch.clamp(self.mask.sum(), min=1.0)


def log_probabilities(logits, labels, ignored):
    known = labels != ignored
    labels = torch.where(labels == ignored, 0, labels)
    chosen = torch.gather(logits.log_softmax(-1), dim=2, index=labels.unsqueeze(2)).squeeze(2)
    return (chosen * known).sum(-1) / known.sum(-1)


class SimPO(nn.Module):
    """Of pairs of sequences of 1,024 tokens: the first half of the batch is preferred."""

    def __init__(self, batch):
        super().__init__()
        self.layer, self.other = output_layer(), output_layer()
        self.states = torch.randn(batch, 1024, WIDTH, requires_grad=True, **BF16)
        self.labels = torch.randint(VOCABULARY, (batch, 1024), device="cuda")

    def forward(self):
        half = len(self.states) // 2
        outputs = self.states @ self.layer.weight.t()
        logits = outputs.float()
        preferred = F.cross_entropy(logits[:half].view(-1, VOCABULARY), self.labels[:half].view(-1))
        chosen = log_probabilities(logits, self.labels, -100)
        return preferred - F.logsigmoid(0.1 * (chosen[:half] - chosen[half:]) - 0.5).mean()


class KTO(nn.Module):
    """Of single sequences of 512 tokens, half of them preferred, with a reference model."""

    def __init__(self, batch):
        super().__init__()
        self.layer, self.reference = output_layer(1024, bias=True), output_layer(1024, bias=True)
        self.others = nn.ModuleList([output_layer(1024, bias=True), output_layer(1024, bias=True)])
        self.states, self.of_reference = torch.randn(batch, 512, 1024, **BF16), torch.randn(batch, 512, 1024, **BF16)
        self.labels = torch.randint(VOCABULARY, (batch, 512), device="cuda")
        self.preferred = (torch.arange(batch) % 2 == 0).to("cuda")
        self.divergence = torch.randn(1, **BF16)

    def forward(self):
        chosen, *logits = self.of_policy()
        with torch.no_grad():
            outputs = self.of_reference @ self.reference.weight.t()
            outputs = outputs + self.reference.bias
            reference = log_probabilities(outputs, self.labels, 42)
        ratios = chosen - reference
        losses = 1 - F.sigmoid(0.1 * torch.where(self.preferred, ratios - self.divergence, self.divergence - ratios))
        return losses.mean(), [part.detach().sum() for part in logits]

    def of_policy(self):
        outputs = self.states @ self.layer.weight.t()
        outputs = outputs + self.layer.bias
        logits = outputs.float()
        chosen = log_probabilities(logits, self.labels, 42)
        return chosen, logits[self.preferred], logits[~self.preferred]


class CrossEntropy(nn.Module):
    """Of single tokens, whose logits stay in bf16."""

    def __init__(self, tokens):
        super().__init__()
        self.layer, self.other = output_layer(), output_layer()
        self.states = torch.randn(tokens, WIDTH, requires_grad=True, **BF16)
        self.labels = torch.randint(VOCABULARY, (tokens,), device="cuda")

    def forward(self):
        return F.cross_entropy(self.layer(self.states), self.labels)


def main(loss, batch):
    made = {"grpo": GRPO, "simpo": SimPO, "kto": KTO, "cross-entropy": CrossEntropy}[loss](int(batch))
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        value = made()
        (value[0] if isinstance(value, tuple) else value).backward()
        del value
    print_peaks(made)


if __name__ == "__main__":
    main(*sys.argv[1:])
