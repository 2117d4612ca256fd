"""BMN of mmaction2's model zoo, which finds actions in the features of a video."""

from itertools import pairwise

import torch
from openmmlab import train
from torch import nn
from torch.nn import functional

BATCH, FEATURES, TIMES, SAMPLES = 8, 400, 100, 32


def convolutions(kind, *widths, kernel, last=None, groups=1):
    """Return convolutions with an activation after each.

    Args:
        last: the activation of the last one.
    """
    made = []
    for inner, outer in pairwise(widths):
        made += [kind(inner, outer, kernel, padding=kernel // 2, groups=groups), nn.ReLU(inplace=True)]
    return [*made[:-1], last or made[-1]]


class Bmn(nn.Module):
    """Scores each moment as a start or an end, and each span of moments by features that are sampled in it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Sequential(*convolutions(nn.Conv1d, FEATURES, 256, 256, kernel=3, groups=4))
        self.start, self.end = self.boundary(), self.boundary()
        self.spans = nn.Sequential(*convolutions(nn.Conv1d, 256, 256, kernel=3))
        self.samples = nn.Parameter(torch.empty(TIMES, SAMPLES * TIMES * TIMES), requires_grad=False)
        self.merged = nn.Sequential(nn.Conv3d(256, 512, (SAMPLES, 1, 1)), nn.ReLU(inplace=True))
        self.scores = nn.Sequential(
            *convolutions(nn.Conv2d, 512, 128, kernel=1),
            *convolutions(nn.Conv2d, 128, 128, 128, kernel=3),
            *convolutions(nn.Conv2d, 128, 2, kernel=1, last=nn.Sigmoid()),
        )

    @staticmethod
    def boundary():
        first = convolutions(nn.Conv1d, 256, 256, kernel=3, groups=4)
        return nn.Sequential(*first, *convolutions(nn.Conv1d, 256, 1, kernel=1, last=nn.Sigmoid()))

    def forward(self, features):
        base = self.base(features)
        sampled = torch.matmul(self.spans(base), self.samples).unflatten(2, (SAMPLES, TIMES, TIMES))
        return self.scores(self.merged(sampled).squeeze(2)), self.start(base), self.end(base)


def losses(model):
    scores, start, end = model(torch.randn(BATCH, FEATURES, TIMES).cuda())
    spans, moments = torch.rand(BATCH, TIMES, TIMES).cuda(), torch.rand(BATCH, 1, TIMES).cuda()
    boundaries = functional.binary_cross_entropy(start, moments) + functional.binary_cross_entropy(end, moments)
    return boundaries + functional.mse_loss(scores[:, 0], spans) + functional.binary_cross_entropy(scores[:, 1], spans)


if __name__ == "__main__":
    with torch.device("meta"):
        model = Bmn()
    train(model.to_empty(device="cuda"), losses, adam=True)
