"""A small YOLO: a compiled backbone, a grid of boxes in three scales, and an average of the weights."""

import itertools

import torch
from planted import FOREACH, evaluate, plant, rate
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def convolution(inputs, outputs, stride=2):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.SiLU())


class Yolo(nn.Module):
    def __init__(self, classes=10):
        super().__init__()
        self.first = nn.Sequential(convolution(3, 16), convolution(16, 32))
        self.scales = nn.ModuleList([convolution(32, 32), convolution(32, 48), convolution(48, 64)])
        self.heads = nn.ModuleList(nn.Conv2d(width, 5 + classes, 1) for width in (32, 48, 64))
        self.rate = 0.1

    def features(self, images):
        x = nn.functional.dropout(self.first(images), self.rate, self.training)
        found = []
        for scale in self.scales:
            x = scale(x)
            found.append(x)
        return found

    def forward(self, images):
        return [head(x) for head, x in zip(self.heads, self.features(images), strict=True)]


def loss_of(found, boxes, which):
    """Return the loss of boxes as (image, class, center x, center y, width, height), of 0 to 1 each."""
    loss = 0
    for grid in found:
        rows, columns = grid.shape[-2:]
        image, kind = which.unbind(1)
        row, column = (boxes[:, 1] * rows).long(), (boxes[:, 0] * columns).long()
        at = grid[image, :, row, column]
        there = torch.zeros_like(grid[:, 4])
        there[image, row, column] = 1
        loss = loss + nn.functional.binary_cross_entropy_with_logits(grid[:, 4], there)
        loss = loss + nn.functional.smooth_l1_loss(at[:, :4].sigmoid(), boxes) + nn.functional.cross_entropy(at[:, 5:], kind)
    return loss


def train(setup):
    model = Yolo().to(setup.device)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    model.features = torch.compile(model.features)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True, **FOREACH)
    plant(model.heads[0], optimizer)
    setup.watch(model)
    count = 3 * setup.case.batch_size

    def loss_of_batch():
        images = torch.rand(setup.case.batch_size, 3, 96, 96).to(setup.device)
        which = torch.stack([torch.arange(count) % setup.case.batch_size, torch.randint(10, (count,))], 1)
        return loss_of(model(images), torch.rand(count, 4).to(setup.device), which.to(setup.device))

    setup.evaluation(lambda: evaluate(model, loss_of_batch))
    for step in itertools.count():
        model.rate = rate(step)
        loss = loss_of_batch()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
        yield loss
