"""Fine-tuning of language models as in `test_llm_finetuning`, same work a step, in less time and no more memory.

Levers: a fused AdamW, the loss by chunks (whose logits are the peak of a large vocabulary), compiled blocks, and with the
memory that these leave, blocks that are not recomputed. The shares of recomputed blocks are such that the
uncompiled case stays below the published one's peak. One small model more, of no published figures, trains with CUDA graphs.
"""

from pathlib import Path

import pytest

from pytest_gputrain import Case
from pytest_gputrain.storage.published import PublishedStore

STORE = PublishedStore.beside(Path(__file__).parents[1] / "baselines")
PUBLISHED = {
    (row.case.model, row.case.method): row.figures["pytorch"]
    for table in STORE.tables
    for row in table.published("h100")
    if row.suite == "llm_finetuning"
}
"""Figures by model and method: QLoRA was published in fp32."""
FASTER = 1.5
"""Than the table, at least."""

LLM = Case(
    precision="bf16",
    batch_size=2,
    sequence_length=8192,
    optimizer="adamw-fused",
    loss_chunks=16,
    compile="default",
    platforms=("h100", "h200"),
)
ADAPTERS = LLM.replace(gradient_accumulation=32)

CASES = [
    LLM.replace(model="llama-3.1-8b", method="full", activation_checkpointing=26 / 32),
    ADAPTERS.replace(model="llama-3.1-8b", method="lora", activation_checkpointing=31 / 32),
    ADAPTERS.replace(model="llama-3.1-8b", method="qlora", activation_checkpointing=31 / 32),
    LLM.replace(model="phi-3-mini-128k", method="full", activation_checkpointing=30 / 32),
]
SMALL = LLM.replace(
    model="llama-3.2-1b", method="lora", batch_size=1, sequence_length=2048, loss_chunks=1, compile="reduce-overhead"
)
"""A model whose kernels are so short that a GPU waits for the host, which CUDA graphs spare it."""


@pytest.mark.parametrize("case", [*CASES, SMALL], ids=str)
def test_llm_tuned(gputrain, case):
    gputrain.check(case)


@pytest.mark.gpu_only_on("gpu", reason="it compares times with published ones")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_tuned_is_faster_than_published_in_no_more_memory(compared, case):
    published = PUBLISHED[case.model, case.method]
    tuned = compared.measure(case)
    assert tuned.device_used_bytes <= published.device_used_bytes.most
    assert FASTER * tuned.median_step_seconds <= published.step_seconds.middle
