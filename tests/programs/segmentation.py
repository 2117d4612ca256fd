"""A U-Net on images that a loader hands over in pinned memory, with Dice and cross entropy."""

import torch
from planted import FOREACH, evaluate, plant
from torch import nn


def twice(inputs, outputs):
    return nn.Sequential(
        *(
            layer
            for width in (inputs, outputs)
            for layer in (nn.Conv2d(width, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.ReLU())
        )
    )


class UNet(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.down, self.middle, self.up = twice(3, 16), twice(16, 32), nn.ConvTranspose2d(32, 16, 2, 2)
        self.last, self.head = twice(32, 16), nn.Conv2d(16, classes, 1)

    def forward(self, images):
        kept = self.down(images)
        middle = self.middle(nn.functional.max_pool2d(kept, 2))
        return self.head(self.last(torch.cat([kept, self.up(middle)], 1)))


def loss_of(logits, masks):
    wanted = nn.functional.one_hot(masks, logits.shape[1]).movedim(-1, 1)
    found = logits.softmax(1)
    dice = 2 * (found * wanted).sum((2, 3)) / (found + wanted).sum((2, 3))
    return nn.functional.cross_entropy(logits, masks) + 1 - dice.mean()


def train(setup):
    images = torch.utils.data.TensorDataset(torch.randn(64, 3, 64, 64), torch.randint(4, (64, 64, 64)))
    pinned = setup.device.type == "cuda"
    loader = torch.utils.data.DataLoader(images, setup.case.batch_size, shuffle=True, pin_memory=pinned, drop_last=True)
    model = UNet().to(setup.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **FOREACH)
    plant(model.head, optimizer)
    setup.watch(model)

    def loss_of_batch(batch):
        images, masks = (part.to(setup.device, non_blocking=True) for part in batch)
        return loss_of(model(images), masks)

    setup.evaluation(lambda: evaluate(model, lambda: loss_of_batch(next(iter(loader)))))
    while True:
        for batch in loader:
            loss = loss_of_batch(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss
