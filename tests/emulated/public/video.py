"""Video classifiers of mmaction2's model zoo, whose README files have the memory of training."""

import argparse
from functools import partial
from itertools import pairwise

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


class Shifted(nn.Module):
    """A convolution whose first channels come from the frames before and after."""

    def __init__(self, convolution, frames):
        super().__init__()
        self.convolution = convolution
        self.frames = frames

    def forward(self, images):
        clips = images.unflatten(0, (-1, self.frames))
        later, earlier, same = clips.split([clips.shape[2] // 8] * 2 + [clips.shape[2] * 3 // 4], 2)
        later = torch.cat([later[:, 1:], (later - later)[:, :1]], 1)
        earlier = torch.cat([(earlier - earlier)[:, :1], earlier[:, :-1]], 1)
        return self.convolution(torch.cat([later, earlier, same], 2).flatten(0, 1))


class ShiftedSegments(Segments):
    """TSM: TSN that shifts channels in front of the first convolution of each block."""

    def __init__(self, frames, classes):
        super().__init__(frames, classes)
        for stage in (self.net.layer1, self.net.layer2, self.net.layer3, self.net.layer4):
            for block in stage:
                block.conv1 = Shifted(block.conv1, frames)


class Factored(nn.Sequential):
    """A convolution in space and one in time, with as many parameters as one in both."""

    def __init__(self, inner, outer, kernel, stride):
        (time, height, width), (step, *steps) = kernel, stride
        area = height * width
        middle = 3 * inner * outer * area // (inner * area + 3 * outer)
        super().__init__(
            nn.Conv3d(inner, middle, (1, height, width), (1, *steps), (0, height // 2, width // 2), bias=False),
            nn.BatchNorm3d(middle),
            nn.ReLU(inplace=True),
            nn.Conv3d(middle, outer, (time, 1, 1), (step, 1, 1), (time // 2, 0, 0), bias=False),
        )


def unit(inner, outer, kernel, stride=(1, 1, 1), *, relu=True, factored=False, epsilon=1e-5, groups=1):
    """Return a convolution with its norm and activation."""
    if factored:
        convolution = Factored(inner, outer, kernel, stride)
    else:
        padding = [width // 2 for width in kernel]
        convolution = nn.Conv3d(inner, outer, kernel, stride, padding, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm3d(outer, epsilon), *[nn.ReLU(inplace=True)] * relu)


class Block(nn.Module):
    """Convolutions beside a shortcut."""

    def __init__(self, convolutions, shortcut=None):
        super().__init__()
        self.convolutions = nn.Sequential(*convolutions)
        self.shortcut = shortcut
        self.relu = nn.ReLU(inplace=True)

    def forward(self, clips):
        made = self.convolutions(clips)
        return self.relu(made + (clips if self.shortcut is None else self.shortcut(clips)))


def bottleneck(inner, width, stride, *, inflated):
    """Return the convolutions of a bottleneck: 3x1x1 first if it is inflated, and 3x3 in space."""
    return [
        unit(inner, width, (3 if inflated else 1, 1, 1)),
        unit(width, width, (1, 3, 3), stride),
        unit(width, 4 * width, (1, 1, 1), relu=False),
    ]


def separated(inner, width, stride, *, inflated):
    """Return the convolutions of a channel-separated bottleneck, whose 3x3x3 sees each channel by itself."""
    return [
        unit(inner, width, (1, 1, 1), epsilon=1e-3),
        unit(width, width, (3, 3, 3), stride, epsilon=1e-3, groups=width),
        unit(width, 4 * width, (1, 1, 1), relu=False, epsilon=1e-3),
    ]


def basic(inner, width, stride, *, inflated):
    """Return the convolutions of a factored basic block."""
    return [
        unit(inner, width, (3, 3, 3), stride, factored=True, epsilon=1e-3),
        unit(width, width, (3, 3, 3), relu=False, factored=True, epsilon=1e-3),
    ]


def stages(blocks, inflated, make=bottleneck, *, width=64, beside=0, strides=(1, 1, 1, 1)):
    """Yield the four stages of a ResNet for clips.

    Args:
        inflated: whether each block is, by stage.
        beside: the share of channels that comes from beside, of those of the last stage.
        strides: in time, of each stage.
    """
    expansion = 1 if make is basic else 4
    factored, epsilon = make is basic, 1e-5 if make is bottleneck else 1e-3
    inner = width
    for stage, many in enumerate(blocks):
        wide = width << stage
        layers = []
        for number in range(many):
            stride = (strides[stage], *[1 + (stage > 0)] * 2) if number == 0 else (1, 1, 1)
            given = inner + int(inner * beside) if number == 0 else inner
            shortcut = None
            if stride != (1, 1, 1) or given != expansion * wide:
                shortcut = unit(given, expansion * wide, (1, 1, 1), stride, relu=False, factored=factored, epsilon=epsilon)
            layers.append(Block(make(given, wide, stride, inflated=inflated[stage][number]), shortcut))
            inner = expansion * wide
        yield nn.Sequential(*layers)


def stem(kernel, stride, width=64, *, factored=False, pool=1, epsilon=1e-5):
    """Return the first layers."""
    first = unit(3, width, kernel, (stride, 2, 2), factored=factored, epsilon=epsilon)
    return nn.Sequential(first, nn.MaxPool3d((1, 3, 3), (pool, 2, 2), (0, 1, 1)))


def head(width, classes):
    """Return the last layers."""
    return nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Dropout(0.5), nn.Flatten(), nn.Linear(width, classes))


def every(blocks, *stage):
    """Return which blocks are inflated, of whole stages."""
    return [[inflated] * many for inflated, many in zip(stage, blocks, strict=True)]


R50 = (3, 4, 6, 3)


def i3d(frames, classes):
    alternating = [[True] * 3, [True, False] * 2, [True, False] * 3, [False, True, False]]
    first, *others = stages(R50, alternating)
    pool = nn.MaxPool3d((2, 1, 1), (2, 1, 1))
    return nn.Sequential(stem((5, 7, 7), 2, pool=2), first, pool, *others, head(2048, classes))


def slowonly(frames, classes):
    return nn.Sequential(stem((1, 7, 7), 1), *stages(R50, every(R50, False, False, True, True)), head(2048, classes))


def r2plus1d(frames, classes):
    first = stem((3, 7, 7), 1, factored=True, epsilon=1e-3)
    return nn.Sequential(first, *stages(R50, every(R50, *[True] * 4), basic, strides=(1, 2, 2, 2)), head(512, classes))


def csn(frames, classes):
    blocks = (3, 8, 36, 3)
    made = stages(blocks, every(blocks, *[True] * 4), separated, strides=(1, 2, 2, 2))
    return nn.Sequential(stem((3, 7, 7), 1, epsilon=1e-3), *made, head(2048, classes))


class SlowFast(nn.Module):
    """A path of few frames, which takes channels of a thin path of eight times as many."""

    def __init__(self, frames, classes):
        super().__init__()
        self.slow = nn.ModuleList([stem((1, 7, 7), 1), *stages(R50, every(R50, False, False, True, True), beside=1 / 4)])
        self.fast = nn.ModuleList([stem((5, 7, 7), 1, 8), *stages(R50, every(R50, *[True] * 4), width=8)])
        self.beside = nn.ModuleList(
            nn.Conv3d(width, 2 * width, (5, 1, 1), (8, 1, 1), (2, 0, 0), bias=False) for width in (8, 32, 64, 128)
        )
        self.head = nn.Sequential(nn.Dropout(0.5), nn.Flatten(), nn.Linear(2304, classes))

    def forward(self, clips):
        slow, fast = clips[:, :, ::8], clips
        for number, (few, many) in enumerate(zip(self.slow, self.fast, strict=True)):
            slow, fast = few(slow), many(fast)
            if number < len(self.beside):
                slow = torch.cat([slow, self.beside[number](fast)], 1)
        pooled = [functional.adaptive_avg_pool3d(path, 1) for path in (slow, fast)]
        return self.head(torch.cat(pooled, 1))


def c3d(frames, classes):
    def layers(*widths, pool=(2, 2, 2), padding=0):
        for inner, outer in pairwise(widths):
            yield from (nn.Conv3d(inner, outer, 3, padding=1), nn.ReLU(inplace=True))
        yield nn.MaxPool3d(pool, pool, padding)

    return nn.Sequential(
        *layers(3, 64, pool=(1, 2, 2)),
        *layers(64, 128),
        *layers(128, 256, 256),
        *layers(256, 512, 512),
        *layers(512, 512, 512, padding=(0, 1, 1)),
        nn.Flatten(),
        *(nn.Linear(8192, 4096), nn.ReLU(), nn.Dropout(0.5)),
        *(nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4096, classes)),
    )


class SoftmaxOfOld(torch.autograd.Function):
    """The softmax of torch before 1.11, which kept its input beside its result."""

    @staticmethod
    def forward(ctx, scores):
        shares = torch._softmax(scores, -1, False)
        ctx.save_for_backward(scores, shares)
        return shares

    @staticmethod
    def backward(ctx, gradient):
        scores, shares = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, shares, -1, scores.dtype)


class Attention(nn.Module):
    """The multi-head attention of torch before 1.11, which also returns the mean of the shares of its heads."""

    def __init__(self, width=768, heads=12):
        super().__init__()
        self.heads = heads
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, tokens):
        """Attend among tokens of the shape (place, sample, width)."""
        places, samples, width = tokens.shape
        query, key, value = self.into(tokens).chunk(3, -1)
        query = query * (width // self.heads) ** -0.5

        def by_head(states):
            return states.contiguous().view(places, samples * self.heads, -1).transpose(0, 1)

        query, key, value = by_head(query), by_head(key), by_head(value)
        shares = SoftmaxOfOld.apply(torch.bmm(query, key.transpose(1, 2)))
        mixed = torch.bmm(shares, value).transpose(0, 1).contiguous().view(places, samples, width)
        return self.out(mixed), shares.unflatten(0, (samples, self.heads)).sum(1) / self.heads


class Dropped(nn.Module):
    """Drops whole samples of a branch."""

    def __init__(self, rate):
        super().__init__()
        self.kept = 1 - rate

    def forward(self, branch):
        if self.kept == 1:
            return branch
        shape = (len(branch), *[1] * (branch.ndim - 1))
        return branch.div(self.kept) * (self.kept + torch.rand(shape, device=branch.device)).floor()


class VideoLayer(nn.Module):
    """A layer of TimeSformer: attention among all tokens given, or first in time and then in space."""

    def __init__(self, frames, rate, *, divided):
        super().__init__()
        self.frames = frames
        self.divided = divided
        self.attention, self.norm = Attention(), nn.LayerNorm(768, 1e-6)
        self.drop = Dropped(rate)
        if divided:
            self.in_time, self.norm_in_time, self.after_time = Attention(), nn.LayerNorm(768, 1e-6), nn.Linear(768, 768)
        self.norm_of_mlp = nn.LayerNorm(768, 1e-6)
        self.mlp = nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768))

    def forward(self, tokens):
        if self.divided:
            tokens = self.over_places(self.over_time(tokens))
        else:
            tokens = tokens + self.drop(self.attention(self.norm(tokens).transpose(0, 1))[0].transpose(0, 1))
        return tokens + self.drop(self.mlp(self.norm_of_mlp(tokens)))

    def over_time(self, tokens):
        first, others = tokens[:, :1], tokens[:, 1:]
        normed = self.norm_in_time(others.reshape(-1, self.frames, 768)).permute(1, 0, 2)
        branch = self.after_time(self.drop(self.in_time(normed)[0].permute(1, 0, 2).contiguous()))
        return torch.cat([first, others + branch.reshape(others.shape)], 1)

    def over_places(self, tokens):
        samples = len(tokens)
        first = tokens[:, :1].repeat(1, self.frames, 1).reshape(samples * self.frames, 1, 768)
        others = tokens[:, 1:].unflatten(1, (-1, self.frames)).transpose(1, 2).reshape(samples * self.frames, -1, 768)
        normed = self.norm(torch.cat([first, others], 1)).permute(1, 0, 2)
        branch = self.drop(self.attention(normed)[0].permute(1, 0, 2).contiguous())
        first = branch[:, 0].reshape(samples, self.frames, 768).mean(1, keepdim=True)
        others = branch[:, 1:].unflatten(0, (samples, self.frames)).transpose(1, 2).reshape(samples, -1, 768)
        return tokens + torch.cat([first, others], 1)


class TimeSformer(nn.Module):
    """A ViT-B/16 for clips. Its tokens attend in space, in space and time at once, or in time and then in space."""

    def __init__(self, frames, classes, *, attends):
        super().__init__()
        self.frames = frames
        self.attends = attends
        self.patches = nn.Conv2d(3, 768, 16, 16)
        self.first, self.places = nn.Parameter(torch.zeros(1, 1, 768)), nn.Parameter(torch.zeros(1, 197, 768))
        if attends != "space":
            self.times = nn.Parameter(torch.zeros(1, frames, 768))
        rates = [0.1 * layer / 11 for layer in range(12)]
        self.layers = nn.Sequential(*(VideoLayer(frames, rate, divided=attends == "divided") for rate in rates))
        self.norm, self.head = nn.LayerNorm(768, 1e-6), nn.Linear(768, classes)

    def forward(self, clips):
        samples = len(clips)
        tokens = self.patches(clips.transpose(1, 2).reshape(-1, *clips.shape[1:2], *clips.shape[3:]))
        tokens = tokens.flatten(2).transpose(1, 2)
        tokens = torch.cat([self.first.expand(len(tokens), -1, -1), tokens], 1) + self.places
        if self.attends != "space":
            first = tokens[:samples, :1]
            others = tokens[:, 1:].unflatten(0, (samples, -1)).transpose(1, 2).flatten(0, 1) + self.times
            tokens = torch.cat([first, others.reshape(samples, -1, 768)], 1)
        tokens = self.layers(tokens)
        if self.attends == "space":
            tokens = tokens.unflatten(0, (samples, -1)).mean(1)
        return self.head(self.norm(tokens)[:, 0])


MODELS = {
    "tsn": Segments,
    "tsm": ShiftedSegments,
    "i3d": i3d,
    "slowonly": slowonly,
    "slowfast": SlowFast,
    "r2plus1d": r2plus1d,
    "csn": csn,
    "c3d": c3d,
    **{f"timesformer-{attends}": partial(TimeSformer, attends=attends) for attends in ("divided", "joint", "space")},
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("batch", type=int)
    parser.add_argument("frames", type=int)
    parser.add_argument("--size", type=int, default=224, help="of a frame in pixels")
    parser.add_argument("--classes", type=int, default=400)
    asked = parser.parse_args()

    def losses(model):
        shape = (asked.frames, 3) if asked.model in ("tsn", "tsm") else (3, asked.frames)
        clips = torch.randn(asked.batch, *shape, asked.size, asked.size).cuda()
        labels = torch.randint(asked.classes, (asked.batch,)).cuda()
        return functional.cross_entropy(model(clips), labels)

    with torch.device("meta"):
        model = MODELS[asked.model](asked.frames, asked.classes)
    nesterov = asked.model.startswith("timesformer")
    train(model.to_empty(device="cuda"), losses, clip=40, nesterov=nesterov, find_unused=asked.model == "csn")


if __name__ == "__main__":
    main()
