"""Language models and denoisers that many people fine-tune, each with LoRA as it trains on one GPU."""

import pytest

from pytest_gputrain import Case, grid

TEXT = Case(method="lora", sequence_length=4096, activation_checkpointing=True)
IMAGE = Case(method="lora", resolution="1024x1024", activation_checkpointing=True)

CASES = [
    *grid(
        TEXT,
        model=[
            *(
                "llama-3.2-1b",
                "llama-3.2-3b",
                "qwen2.5-0.5b",
                "qwen2.5-1.5b",
                "qwen2.5-7b",
                "qwen3-0.6b",
                "qwen3-4b",
                "qwen3-8b",
            ),
            *(
                "qwen3-30b-a3b",
                "mistral-7b-v0.1",
                "mistral-7b-v0.3",
                "gemma-3-1b",
                "gemma-3-4b",
                "phi-4",
                "deepseek-v2-lite",
            ),
        ],
        platforms=["h100"],
    ),
    *grid(TEXT, model=["mixtral-8x7b"], platforms=["h200"]),
    *grid(IMAGE, model=["sd3.5-medium", "sd3.5-large", "flux.2-klein-4b"], platforms=["h100"]),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_popular_models(gputrain, case):
    gputrain.check(case)
