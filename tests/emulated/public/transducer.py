"""torchaudio's transducer loss of speech recognition, for the two batches of LibriSpeech around the peak of a comparison.

The joiner adds the encoder's and the decoder's states of 512 channels, and projects them to 500 tokens. The tensors of a
batch are kept until those of the next replace them, as in the benchmark.
"""

import sys

import torch
import torchaudio  # noqa: F401  (it registers the operator)
from peaks import print_peaks
from torch import nn

CHANNELS, TOKENS = 512, 500
BATCHES = {"30": [(30, 421, 96), (30, 451, 120)], "10k": [(21, 455, 111), (22, 455, 111)]}
"""Utterances, frames and tokens of the batch before the largest that the benchmark profiled, and of that."""


class Loss(torch.autograd.Function):
    """The loss as in torchaudio of 2022: its gradients were a second output, for whose own gradients torch makes zeros."""

    @staticmethod
    def forward(ctx, *given):
        costs, gradients = torch.ops.torchaudio.rnnt_loss_forward(*given)
        ctx.save_for_backward(gradients)
        return costs, gradients

    @staticmethod
    def backward(ctx, of_costs, of_gradients):
        (gradients,) = ctx.saved_tensors
        return gradients * of_costs.view(-1, 1, 1, 1), *[None] * 6


def main(case):
    project = nn.Linear(CHANNELS, TOKENS).to("cuda")
    for number, frames, tokens in BATCHES[case]:
        lengths = torch.tensor([[frames, tokens]] * number, dtype=torch.int32, device="cuda")
        encoded = torch.rand(number, frames, CHANNELS, requires_grad=True, device="cuda")
        decoded = torch.rand(number, tokens + 1, CHANNELS, requires_grad=True, device="cuda")
        of_frames, of_tokens = lengths[:, 0].contiguous(), lengths[:, 1].contiguous()
        targets = torch.randint(1, TOKENS, (number, tokens), dtype=torch.int32, device="cuda")
        added = encoded.unsqueeze(2) + decoded.unsqueeze(1)
        logits = project(torch.tanh(added))
        Loss.apply(logits, targets, of_frames, of_tokens, 0, -1.0, True)[0].sum().backward()
        project.zero_grad()
    print_peaks(project)


if __name__ == "__main__":
    main(sys.argv[1])
