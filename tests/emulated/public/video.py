"""Video classifiers of mmaction2's model zoo, whose README files have the memory of training."""

import argparse

import torch
from openmmlab import train
from torch import nn
from torch.nn import functional
from torchvision.models import resnet50


class Segments(nn.Module):
    """TSN: a ResNet-50 sees each frame by itself, and their scores are averaged."""

    def __init__(self, frames, classes):
        super().__init__()
        self.frames = frames
        self.net = resnet50(num_classes=classes)
        self.net.fc = nn.Sequential(nn.Dropout(0.4), self.net.fc)

    def forward(self, clips):
        return self.net(clips.flatten(0, 1)).unflatten(0, (-1, self.frames)).mean(1)


MODELS = {"tsn": Segments}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("batch", type=int)
    parser.add_argument("frames", type=int)
    parser.add_argument("--size", type=int, default=224, help="of a frame in pixels")
    parser.add_argument("--classes", type=int, default=400)
    asked = parser.parse_args()

    def losses(model):
        shape = (asked.frames, 3) if asked.model == "tsn" else (3, asked.frames)
        clips = torch.randn(asked.batch, *shape, asked.size, asked.size).cuda()
        labels = torch.randint(asked.classes, (asked.batch,)).cuda()
        return functional.cross_entropy(model(clips), labels)

    train(MODELS[asked.model](asked.frames, asked.classes), losses, clip=40)


if __name__ == "__main__":
    main()
