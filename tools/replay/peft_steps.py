"""Fine-tuning steps with peft: a small Llama with adapters of many kinds."""

import torch

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = ["q_proj", "v_proj"]


def in_turn(*loops):
    """Yield from each loop in turn, so that one process trains all models, and each of its steps is judged."""
    while True:
        for loop in loops:
            yield next(loop)


def tune(setup, kind, options=None, layers=4):
    """Train the adapters of a Llama of so many layers."""
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = peft.get_peft_model(LlamaForCausalLM(config), getattr(peft, kind)(task_type="CAUSAL_LM", **(options or {}))).to(
        setup.device
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    while True:
        tokens = torch.randint(512, (4, 64)).to(setup.device)
        loss = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        if kind == "AdaLoraConfig":
            model.base_model.update_and_allocate(1)
        optimizer.zero_grad()
        yield loss


def kinds(setup):
    """Six kinds of adapters."""
    return in_turn(
        tune(setup, "AdaLoraConfig", {"target_modules": ATTENTION, "total_step": 100, "tinit": 2, "tfinal": 10}),
        tune(setup, "OFTConfig", {"target_modules": ATTENTION, "oft_block_size": 32}),
        tune(setup, "LoKrConfig", {"target_modules": LINEAR, "r": 8}),
        tune(setup, "VeraConfig", {"target_modules": ATTENTION}),
        tune(setup, "HiraConfig", {"target_modules": LINEAR}),
        tune(setup, "PrefixTuningConfig", {"num_virtual_tokens": 8}),
    )


def deep(setup):
    """LoRA in all layers of a deep model, and DoRA in those of another one."""
    lora = tune(setup, "LoraConfig", {"r": 8, "target_modules": LINEAR, "lora_dropout": 0.05}, layers=32)
    dora = tune(setup, "LoraConfig", {"r": 8, "target_modules": LINEAR, "use_dora": True}, layers=16)
    return in_turn(lora, dora)


def test_kinds(gputrain):
    gputrain.check(kinds, precision="fp32", batch_size=4, warmup=6, steps=12, gradient_accumulation=6)


def test_deep_models(gputrain):
    gputrain.check(deep, precision="fp32", batch_size=4, warmup=2, steps=4, gradient_accumulation=2)
