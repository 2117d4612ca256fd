"""Training steps with open_clip: its models, losses and tasks with small widths."""

import torch

TEXT = {"context_length": 32, "vocab_size": 512, "width": 128, "heads": 4}


def in_turn(*loops):
    """Yield from each loop in turn, so that one process trains all models, and each of its steps is judged."""
    while True:
        for loop in loops:
            yield next(loop)


def train(setup, task, inputs):
    """Yield the loss after each step of ``open_clip_train``'s loop."""
    model = task.trainable_module
    plain = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    others = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    optimizer = torch.optim.AdamW([{"params": plain, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.2}], lr=5e-4)
    while True:
        batch = task.prepare_batch(inputs(), setup.device)
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=setup.case.precision == "bf16-amp"):
            losses = task(batch)
        loss = (losses[0] if isinstance(losses, tuple) else losses)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        task.clamp_logit_scale()
        yield loss


def pairs(size=64):
    return lambda: {"image": torch.randn(4, 3, size, size), "text": torch.randint(1, 512, (4, 32))}


def clip(setup, layers, checkpointing=False):
    """A plain CLIP with towers of so many layers."""
    from open_clip.model import CLIP
    from open_clip.task import CLIPTask

    vision = {"image_size": 64, "layers": layers, "width": 128, "head_width": 32, "patch_size": 16}
    model = CLIP(64, vision, {**TEXT, "layers": layers}, output_dict=True).to(setup.device)
    model.set_grad_checkpointing(checkpointing)
    return train(setup, CLIPTask(model, device=setup.device, verbose=False), pairs())


def resnet(setup):
    """A CLIP whose pictures go through a modified ResNet."""
    from open_clip.model import CLIP
    from open_clip.task import CLIPTask

    vision = {"image_size": 64, "layers": [1, 1, 2, 1], "width": 32, "patch_size": None}
    model = CLIP(64, vision, {**TEXT, "layers": 4}, output_dict=True).to(setup.device)
    return train(setup, CLIPTask(model, device=setup.device, verbose=False), pairs())


def siglip(setup):
    """A SigLIP of a timm model and a text tower without a causal mask."""
    from open_clip.model import CustomTextCLIP
    from open_clip.task import SigLIPTask

    vision = {"image_size": 224, "timm_model_name": "vit_tiny_patch16_224", "timm_pool": "map", "timm_proj": "none"}
    text = {**TEXT, "layers": 4, "no_causal_mask": True, "pool_type": "last", "proj_bias": True}
    model = CustomTextCLIP(192, vision, text, init_logit_bias=-10, output_dict=True).to(setup.device)
    return train(setup, SigLIPTask(model, device=setup.device, verbose=False), pairs(size=224))


def coca(setup):
    """A CoCa, with attentional pooling and captions."""
    from open_clip.coca_model import CoCa
    from open_clip.task import CoCaTask

    vision = {"image_size": 64, "layers": 4, "width": 128, "head_width": 32, "patch_size": 16, "attentional_pool": True}
    vision |= {"attn_pooler_heads": 4, "output_tokens": True}
    text = {**TEXT, "layers": 4, "embed_cls": True, "output_tokens": True}
    decoder = {"context_length": 32, "vocab_size": 512, "layers": 4, "width": 128, "heads": 4}
    model = CoCa(128, decoder, text, vision).to(setup.device)
    return train(setup, CoCaTask(model, device=setup.device, verbose=False), pairs())


def audio(setup):
    """A CLAP with a Whisper encoder of 30 s of audio."""
    from open_clip.audio.config import CLIPAudioCfg
    from open_clip.clap_model import CLAP
    from open_clip.model import CLIPTextCfg
    from open_clip.task import CLAPTask

    config = CLIPAudioCfg(model_type="Whisper", model_name="tiny", sample_rate=16000)
    model = CLAP(64, config, CLIPTextCfg(**TEXT, layers=4), output_dict=True).to(setup.device)

    def inputs():
        return {"audio": {"waveform": torch.randn(2, 480000)}, "text": torch.randint(1, 512, (2, 32))}

    return train(setup, CLAPTask(model, device=setup.device, verbose=False), inputs)


def models(setup):
    """Five models with their losses."""
    return in_turn(clip(setup, 6, checkpointing=True), resnet(setup), siglip(setup), coca(setup), audio(setup))


def test_models(gputrain):
    gputrain.check(models, precision="bf16-amp", batch_size=4, warmup=5, steps=10, gradient_accumulation=5)


def test_a_deep_model(gputrain):
    gputrain.check(clip, precision="fp32", batch_size=4, warmup=1, steps=3, args={"layers": 32})
