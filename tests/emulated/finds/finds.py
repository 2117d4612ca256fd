"""Trainings with public libraries, each as the library is and mended. docs/finding-waits.md has their waits.

The pytest process has no stand-ins and cannot import torch, so the functions that the worker calls import it.
"""

import functools

import pytest

IMAGE = 500
"""The token in whose places the model puts what it sees."""


def steps(setup, model, loss_of, after=lambda: None):
    import torch

    setup.watch(model)
    optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
    while True:
        loss = loss_of()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after()
        yield loss


def layers(setup):
    """A small model of torch alone, and its loss."""
    import torch

    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)]).to(setup.device)
    batch = torch.randn(8, 64, device=setup.device)
    return model, lambda: model(batch).square().mean()


def adapted(setup, config, mend=lambda model: None):
    """A language model of four layers with an adapter of PEFT in two products of each, and its loss."""
    import peft
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, num_attention_heads=4, **sizes))
    model = peft.get_peft_model(model, config(target_modules=["q_proj", "v_proj"])).to(setup.device)
    ids = torch.randint(512, (2, 32), device=setup.device)
    mend(model)
    return model, lambda: model(input_ids=ids, labels=ids).loss


def beit(setup, mended):
    import torch
    from transformers import BeitConfig, BeitForImageClassification

    sizes = {"image_size": 64, "hidden_size": 64, "intermediate_size": 128}
    config = BeitConfig(num_hidden_layers=4, num_attention_heads=4, use_relative_position_bias=True, **sizes)
    model = BeitForImageClassification(config).to(setup.device)

    def on_gpu(make, window):
        return make(window).to(setup.device)

    for module in model.modules():
        if mended and hasattr(module, "generate_relative_position_index"):
            make = functools.partial(on_gpu, module.generate_relative_position_index)
            module.generate_relative_position_index = functools.cache(make)
    images, labels = torch.randn(2, 3, 64, 64, device=setup.device), torch.randint(2, (2,), device=setup.device)
    return steps(setup, model, lambda: model(pixel_values=images, labels=labels).loss)


def fourier(setup, mended):
    from peft import FourierFTConfig

    def mend(model):
        for module in model.modules():
            if mended and isinstance(getattr(module, "indices", None), dict):
                module.indices = {name: index.to(setup.device) for name, index in module.indices.items()}

    return steps(setup, *adapted(setup, functools.partial(FourierFTConfig, n_frequency=20), mend))


def wavelet(setup, mended):
    from peft import WaveFTConfig
    from peft.tuners.waveft import waverec2d

    def mend(model):
        if mended:
            waverec2d._get_filter_tensors = functools.cache(waverec2d._get_filter_tensors)
        for module in model.modules():
            if mended and hasattr(module, "waveft_indices"):
                module.waveft_indices = {name: index.to(setup.device) for name, index in module.waveft_indices.items()}

    return steps(setup, *adapted(setup, functools.partial(WaveFTConfig, n_frequency=20), mend))


def butterfly(setup, mended):
    import torch
    from peft import BOFTConfig
    from peft.tuners.boft.layer import BOFTLayer

    def without_check(self, data):
        skew = 0.5 * (data - data.transpose(1, 2))
        one = torch.eye(data.shape[1], device=data.device).expand_as(data)
        return torch.linalg.solve_ex(one + skew, one - skew, left=False).result.to(data.dtype)

    if mended:
        BOFTLayer.cayley_batch = without_check
    return steps(setup, *adapted(setup, functools.partial(BOFTConfig, boft_block_size=4)))


def averaged(setup, mended):
    import torch
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model, loss_of = layers(setup)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))

    def after():
        if mended and average.n_averaged > 0:
            with torch.no_grad():
                torch._foreach_lerp_(list(average.module.parameters()), list(model.parameters()), 0.001)
        else:
            average.update_parameters(model)

    return steps(setup, model, loss_of, after)


def mean_of_losses(setup, mended):
    from torchmetrics import MeanMetric

    model, loss_of = layers(setup)
    mean = MeanMetric(nan_strategy="disable" if mended else "warn").to(setup.device)

    def loss_and_mean():
        loss = loss_of()
        mean.update(loss.detach())
        return loss

    return steps(setup, model, loss_and_mean)


def batches(setup, mended):
    import torch
    from accelerate import Accelerator, DataLoaderConfiguration

    model, _ = layers(setup)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=mended))
    data = torch.utils.data.TensorDataset(torch.randn(800, 64), torch.randn(800, 64))
    loader = accelerator.prepare(torch.utils.data.DataLoader(data, batch_size=8, pin_memory=True))
    batch = (batch for _ in iter(int, 1) for batch in loader)

    def loss_of():
        inputs, targets = next(batch)
        return (model(inputs) - targets).square().mean()

    return steps(setup, model, loss_of)


def images(setup, mended):
    """Two images of 8 x 8 patches, of which four become a token. 24 layers read them."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration
    from transformers.vision_utils import get_vision_cu_seqlens

    sizes = {"hidden_size": 64, "intermediate_size": 128}
    text = {"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    vision = {"depth": 24, "num_heads": 4, "out_hidden_size": 64, "deepstack_visual_indexes": [5, 11, 17], **sizes}
    config = Qwen3VLConfig(text_config=text | sizes, vision_config=vision, image_token_id=IMAGE)
    model = Qwen3VLForConditionalGeneration(config).to(setup.device)

    def with_lengths_on_cpu(visual, args, kwargs):
        return args, kwargs | {"cu_seqlens": get_vision_cu_seqlens(kwargs["grid_thw"].cpu())}

    if mended:
        model.model.visual.register_forward_pre_hook(with_lengths_on_cpu, with_kwargs=True)
    ids = torch.tensor([*[IMAGE] * 16, *range(16)]).repeat(2, 1)
    batch = {
        "input_ids": ids,
        "labels": ids,
        "mm_token_type_ids": (ids == IMAGE).int(),
        "pixel_values": torch.randn(128, 3 * 2 * 16 * 16),
        "image_grid_thw": torch.tensor([[1, 8, 8]] * 2),
    }
    batch = {name: value.to(setup.device) for name, value in batch.items()}
    return steps(setup, model, lambda: model(**batch).loss)


def trainer(setup, mended):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 512}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, num_attention_heads=4, **sizes))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(512, (64, 32))]
    options = {"logging_nan_inf_filter": False, "accelerator_config": {"non_blocking": True}} if mended else {}
    return Trainer(model, TrainingArguments("out", per_device_train_batch_size=8, **options), train_dataset=rows)


def logged(setup, mended):
    import lightning
    import torch

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, _ = layers(setup)
            self.rate = torch.tensor(0.1, device=setup.device) if mended else 0.1

        def training_step(self, batch, index):
            inputs, targets = batch
            loss = (self.net(inputs) - targets).square().mean()
            self.log("loss", loss, prog_bar=not mended)
            self.log("rate", self.rate)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    data = torch.utils.data.TensorDataset(torch.randn(800, 64), torch.randn(800, 64))
    loader = torch.utils.data.DataLoader(data, batch_size=8, pin_memory=True)
    trainer = lightning.Trainer(max_steps=100, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    return trainer, Module(), loader


FINDS = [averaged, batches, beit, butterfly, fourier, images, logged, mean_of_losses, trainer, wavelet]


@pytest.mark.parametrize("mended", [False, True])
@pytest.mark.parametrize("find", FINDS)
def test_find(gputrain, find, mended):
    gputrain.check(find, args={"mended": mended}, precision="fp32", batch_size=8)
