"""FCOS on images with different numbers of boxes: each point belongs to the smallest box around it."""

import torch
from planted import FOREACH, evaluate, plant
from torch import nn
from torch.nn import functional


def convolution(inputs, outputs, stride=2):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride, 1), nn.GroupNorm(4, outputs), nn.ReLU())


class Fcos(nn.Module):
    def __init__(self, width=32, classes=10):
        super().__init__()
        self.stages = nn.ModuleList([nn.Sequential(convolution(3, 16), convolution(16, width)), convolution(width, width)])
        self.across = nn.Conv2d(width, width, 1)
        self.head = nn.Sequential(convolution(width, width, 1), nn.Conv2d(width, 4 + classes, 1))

    def forward(self, images):
        fine = self.stages[0](images)
        coarse = self.stages[1](fine)
        fine = self.across(fine) + functional.interpolate(coarse, scale_factor=2)
        return [self.head(level).flatten(2).mT for level in (fine, coarse)]


def points(side, stride, device):
    centers = (torch.arange(side, device=device) + 0.5) * stride
    return torch.cartesian_prod(centers, centers).flip(1)


def loss_of(found, places, boxes, classes):
    """Return the loss of an image: ``found`` for each of its places, and its boxes as left, top, right, bottom."""
    sides = torch.cat([places[:, None] - boxes[None, :, :2], boxes[None, :, 2:] - places[:, None]], 2)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    smallest, which = torch.where(sides.amin(2) > 0, areas, torch.inf).min(1)
    inside = smallest.isfinite()
    wanted = functional.one_hot(classes[which], found.shape[1] - 4) * inside[:, None]
    of_classes = functional.binary_cross_entropy_with_logits(found[:, 4:], wanted.float())
    of_sides = functional.smooth_l1_loss(found[inside, :4], sides[inside, which[inside]] / 64, reduction="sum")
    return of_classes + of_sides / inside.sum().clamp(min=1)


def train(setup):
    model = Fcos().to(setup.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **FOREACH)
    plant(model.across, optimizer)
    setup.watch(model)
    places = torch.cat([points(24, 4, setup.device), points(12, 8, setup.device)])

    def loss_of_batch():
        images = torch.randn(setup.case.batch_size, 3, 96, 96).to(setup.device)
        loss = 0
        for count, found in enumerate(torch.cat(model(images), 1), 1):
            corners = 64 * torch.rand(count, 2)
            boxes = torch.cat([corners, corners + 8 + 24 * torch.rand(count, 2)], 1).to(setup.device)
            loss = loss + loss_of(found, places, boxes, torch.randint(10, (count,)).to(setup.device))
        return loss

    setup.evaluation(lambda: evaluate(model, loss_of_batch))
    while True:
        loss = loss_of_batch()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss
