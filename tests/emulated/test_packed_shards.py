"""QLoRA under FSDP2 on an emulated GPU: what is in memory once packed weights are shards."""

import json

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 16384,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}
BUILT = """
    import gc
    from pathlib import Path

    import torch

    from pytest_gputrain import Case
    from pytest_gputrain.cases.model_config import with_model
    from pytest_gputrain.worker.group import Group
    from pytest_gputrain.worker.training import Training

    case = Case(model="config.json", method="qlora", parallel="fsdp", gpus=4, sequence_length=32)
    device, group = torch.device("cuda", 0), Group(size=4, simulated=True)
    with group.joined(device):
        training = Training(with_model(case, Path.cwd()), "full", device, group)
        gc.collect()
        torch.cuda.empty_cache()
        print(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
"""


def test_shards_of_packed_weights_leave_no_holes_that_cannot_be_given_back(emulate, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done, _ = emulate(BUILT)
    assert done.returncode == 0, done.stderr
    allocated, reserved = map(int, done.stdout.split())
    packed = 8 * (4 * 2048 + 3 * 16384) * 2048 // 2
    assert packed / 4 < allocated < packed / 3
    assert reserved < 1.3 * allocated, "built in one memory pool, it is several times as much"
