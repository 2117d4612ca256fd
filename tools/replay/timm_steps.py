"""Training steps with timm: models of several families, each with another optimizer."""

import torch


def in_turn(*loops):
    """Yield from each loop in turn, so that one process trains all models, and each of its steps is judged."""
    while True:
        for loop in loops:
            yield next(loop)


def step_of(model, optimizer, batch, loss_of):
    """Yield the loss after each step of a usual loop with clipping and an average of the weights."""
    from timm.utils import ModelEmaV3, dispatch_clip_grad

    average = ModelEmaV3(model, decay=0.999)
    while True:
        inputs, labels = batch()
        loss = loss_of(model(inputs), labels)
        loss.backward()
        dispatch_clip_grad(model.parameters(), value=1.0)
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)
        yield loss


def images(setup, name, optimizer, size=64, decay=None, options=None):
    """Train a model of timm on images."""
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2

    model = timm.create_model(name, num_classes=16, **(options or {})).to(setup.device)
    trainer = create_optimizer_v2(model, opt=optimizer, lr=1e-3, weight_decay=0.05, layer_decay=decay)
    mixup = Mixup(mixup_alpha=0.8, num_classes=16)

    def batch():
        pictures, labels = torch.randn(4, 3, size, size), torch.randint(16, (4,))
        return mixup(pictures.to(setup.device), labels.to(setup.device))

    return step_of(model, trainer, batch, SoftTargetCrossEntropy())


def patches(setup):
    """Train a NaFlexViT on patches of pictures of different sizes, with padding and masks."""
    import timm
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2

    shape = {"embed_dim": 64, "depth": 8, "num_heads": 2}
    model = timm.create_model("naflexvit_base_patch16_gap", num_classes=16, **shape).to(setup.device)
    trainer = create_optimizer_v2(model, opt="lion", lr=1e-4, weight_decay=0.05)
    coordinates = torch.cartesian_prod(torch.arange(6), torch.arange(6)).repeat(4, 1, 1)
    valid = torch.arange(36) < torch.tensor([[36], [30], [24], [18]])

    def batch():
        inputs = {"patches": torch.randn(4, 36, 768), "patch_coord": coordinates, "patch_valid": valid}
        return {name: value.to(setup.device) for name, value in inputs.items()}, torch.randint(16, (4,)).to(setup.device)

    return step_of(model, trainer, batch, LabelSmoothingCrossEntropy())


def distillation(setup):
    """Train a small network with the logits of a larger one."""
    import timm
    from timm.optim import create_optimizer_v2
    from timm.task import DistillationTeacher, LogitDistillationTask

    student = timm.create_model("efficientnet_b0", num_classes=16).to(setup.device)
    teacher = DistillationTeacher(timm.create_model("resnet18", num_classes=16).to(setup.device), device=setup.device)
    task = LogitDistillationTask(student, teacher, torch.nn.CrossEntropyLoss(), device=setup.device, verbose=False)
    trainer = create_optimizer_v2(student, opt="rmsproptf", lr=1e-3)
    while True:
        pictures, labels = torch.randn(4, 3, 64, 64), torch.randint(16, (4,))
        with torch.autocast("cuda", torch.bfloat16):
            loss = task(pictures.to(setup.device), labels.to(setup.device))["loss"]
        loss.backward()
        trainer.step()
        trainer.zero_grad()
        yield loss


def families(setup):
    """Five architectures with five optimizers."""
    pooled = {"img_size": 64, "depth": 6, "global_pool": "map", "reg_tokens": 2}
    return in_turn(
        images(setup, "vit_small_patch16_dinov3", "nadamw", options={"depth": 6}),
        images(setup, "vit_tiny_patch16_224", "laprop", options=pooled),
        images(setup, "convnext_atto", "adopt"),
        images(setup, "swin_tiny_patch4_window7_224", "lamb", options={"img_size": 64, "window_size": 2, "embed_dim": 48}),
        patches(setup),
    )


def deep(setup):
    """A ViT of 48 blocks with Muon and another learning rate for each layer."""
    shape = {"img_size": 64, "embed_dim": 64, "num_heads": 2, "depth": 48, "drop_path_rate": 0.1, "qk_norm": True}
    return images(setup, "vit_base_patch16_224", "nmuon", decay=0.9, options=shape)


def test_families(gputrain):
    gputrain.check(families, precision="fp32", batch_size=4, warmup=5, steps=10, gradient_accumulation=5)


def test_a_deep_model(gputrain):
    gputrain.check(deep, precision="fp32", batch_size=4, warmup=1, steps=3)


def test_distillation(gputrain):
    gputrain.check(distillation, precision="bf16-amp", batch_size=4, warmup=1, steps=3)
