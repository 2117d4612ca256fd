"""Whisper of transformers on spectrograms, with a schedule of its learning rate."""

import torch
from planted import FOREACH, evaluate, plant
from transformers import WhisperConfig, WhisperForConditionalGeneration


def train(setup):
    sizes = {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in SIZES.items()}
    config = WhisperConfig(
        vocab_size=512,
        d_model=64,
        num_mel_bins=16,
        max_source_positions=50,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        begin_suppress_tokens=None,
        **sizes,
    )
    model = WhisperForConditionalGeneration(config).to(setup.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **FOREACH)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=100)
    plant(model.model.decoder.layers[0].fc2, optimizer)
    setup.watch(model)

    def loss_of_batch():
        sounds = torch.randn(setup.case.batch_size, 16, 100).to(setup.device)
        spoken = torch.randint(3, 512, (setup.case.batch_size, 24)).to(setup.device)
        return model(input_features=sounds, labels=spoken).loss

    setup.evaluation(lambda: evaluate(model, loss_of_batch))
    while True:
        loss = loss_of_batch()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield loss


SIZES = {"layers": 2, "attention_heads": 2, "ffn_dim": 128}
