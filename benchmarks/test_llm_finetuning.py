"""Fine-tuning of language models: batch 2 x 8,192 unpadded tokens, bf16 weights, torch AdamW, activation checkpointing.

The 19 rows of the llm-trainer tables, which were published for each of three GPUs. A step is one micro-batch, as there.
QLoRA and Gemma 2 are declared twice: as today's libraries train them, and as the published program did, which is what their
rows are compared with (docs/llm-finetuning.md).
"""

import pytest

from pytest_gputrain import Case, grid

PUBLISHED = ["h100", "a100", "rtx_pro_6000"]
LLM = Case(
    precision="bf16",
    batch_size=2,
    sequence_length=8192,
    activation_checkpointing=True,
    optimizer="adamw",
    platforms=(*PUBLISHED, "h200"),
)
ADAPTERS = LLM.replace(gradient_accumulation=32)
SHARDED = LLM.replace(gradient_accumulation=32, parallel="fsdp", gpus=2, cpu_offload=True)

MODELS = ["llama-3.1-8b", "llama-3-8b", "llama-2-13b", "gemma-2-9b", "gemma-7b", "phi-3-mini-128k"]
THEN = {"attention": ["sdpa-4.49"], "platforms": PUBLISHED}
AS_PUBLISHED = [
    *grid(SHARDED, model=["gemma-2-9b"], method=["full"], **THEN),
    *grid(ADAPTERS, model=["gemma-2-9b"], method=["lora"], **THEN),
    *grid(ADAPTERS, model=MODELS, method=["qlora"], precision=["fp32"], **THEN),
]
CASES = [
    *grid(LLM, model=["llama-3.1-8b", "llama-3-8b", "phi-3-mini-128k"], method=["full"]),
    *grid(SHARDED, model=["llama-2-13b", "gemma-2-9b", "gemma-7b"], method=["full"]),
    *grid(ADAPTERS, model=MODELS, method=["lora", "qlora"]),
    *grid(SHARDED, model=["llama-3.1-70b"], method=["lora"]),
    *AS_PUBLISHED,
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_llm_finetuning(gputrain, case):
    gputrain.check(case)


@pytest.mark.parametrize("full", [case for case in CASES if case.method == "full" and case.parallel == "single"], ids=str)
def test_lora_allocates_less_than_full(compared, full):
    if compared.scale == "tiny":
        pytest.skip("at tiny scale activations are most of the memory, and adapters add to them")
    lora = compared.measure(ADAPTERS, model=full.model, method="lora")
    assert lora.peak_allocated_bytes < compared.measure(full).peak_allocated_bytes


@pytest.mark.parametrize("qlora", grid(ADAPTERS, model=["llama-3.1-8b", "gemma-7b"], method=["qlora"]), ids=str)
def test_qlora_stores_less_than_half_of_lora(compared, qlora):
    # At tiny scale embeddings and adapters, which keep their 16 bits, are most of the model: there it stores less at all.
    share = 1 / 2 if compared.scale == "full" else 1
    assert compared.measure(qlora).model_bytes < share * compared.measure(qlora, method="lora").model_bytes


@pytest.mark.parametrize(
    "qlora",
    [case for case in AS_PUBLISHED if case.method == "qlora" and case.model in ("llama-3.1-8b", "gemma-7b")],
    ids=str,
)
def test_qlora_in_fp32_takes_less_than_lora_of_short_samples_only(compared, qlora):
    if compared.scale == "tiny":
        pytest.skip("at tiny scale activations, which fp32 doubles, are most of the memory")
    # The document has it so: less below 1,500 tokens a sample, and more in its rows of these models, which have 8,192.
    (lora,) = grid(ADAPTERS, model=[qlora.model], method=["lora"])
    for of_lora, of_qlora, takes_less in (
        (*grid(lora, sequence_length=[1024]), *grid(qlora, sequence_length=[1024]), True),
        (lora, qlora, False),
    ):
        less = compared.measure(of_qlora).peak_allocated_bytes < compared.measure(of_lora).peak_allocated_bytes
        assert less == takes_less, f"{of_qlora} against {of_lora}"
