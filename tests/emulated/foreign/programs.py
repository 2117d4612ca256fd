"""Twelve programs of other packages with random weights, in each of which the variable PLANTED switches on a regression.

`tensor` is held through a step's peak, `leak` is kept after each step, and `below` lives while less is allocated than at the
peak. The pytest process has no stand-ins and cannot import torch, so the functions that the worker calls import it.
"""

import os
import random
import tempfile

import pytest

PLANTED = os.environ.get("PLANTED", "")


def contrastive(setup):
    """Sentence embeddings of sentence-transformers, whose cached loss runs backward passes in a hook of another one."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
    from transformers import BertConfig, BertModel

    with tempfile.TemporaryDirectory() as folder:
        config = BertConfig(
            hidden_size=256, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=4, vocab_size=1000
        )
        BertModel(config).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        words = Transformer(folder)
    model = SentenceTransformer(modules=[words, Pooling(256)], device=str(setup.device))
    loss_of = CachedMultipleNegativesRankingLoss(model, mini_batch_size=64)
    optimizer = torch.optim.AdamW(model.parameters())
    setup.watch(model)
    kept = []
    while True:
        if PLANTED == "leak":
            kept.append(torch.ones(256, 1024, device=setup.device))  # planted leak
        held = torch.ones(8192, 1024, device=setup.device) if PLANTED == "tensor" else None  # planted tensor
        pairs = [model.tokenize([sentence() for _ in range(setup.case.batch_size)]) for _ in range(2)]
        pairs = [{name: value.to(setup.device) for name, value in each.items() if name != "modality"} for each in pairs]
        loss = loss_of(pairs, None)
        loss.backward()
        del held
        if PLANTED == "below":
            torch.ones(10240, 1024, device=setup.device)  # planted below
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def ppo(setup):
    """PPO of stable-baselines3 on images of several environments: what it samples goes through the host."""
    import gymnasium
    import numpy
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    class Screen(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(0, 255, (4, 84, 84), numpy.uint8)
        action_space = gymnasium.spaces.Discrete(6)

        def reset(self, *, seed=None, options=None):
            self.steps = 0
            return numpy.zeros((4, 84, 84), numpy.uint8), {}

        def step(self, action):
            self.steps += 1
            return numpy.zeros((4, 84, 84), numpy.uint8), 1.0, False, self.steps == 20, {}

    environments = DummyVecEnv([Screen] * 64)
    sizes = {"n_steps": setup.case.batch_size // 64, "batch_size": setup.case.batch_size, "n_epochs": 1}
    model = PPO("CnnPolicy", environments, device=setup.device, **sizes)
    setup.watch(model.policy)
    _, callback = model._setup_learn(10**9)
    kept = []

    def before_update(*_):
        if PLANTED == "below":
            torch.ones(12288, 1024, device=setup.device)  # planted below

    model.policy.optimizer.register_step_pre_hook(before_update)
    while True:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
        if PLANTED == "leak":
            kept.append(torch.ones(256, 1024, device=setup.device))  # planted leak
        held = torch.ones(8192, 1024, device=setup.device) if PLANTED == "tensor" else None  # planted tensor
        model.train()
        del held
        yield torch.tensor(model.logger.name_to_value["train/loss"])


def graphs(setup):
    """Graphs of different sizes in torch_geometric: messages along edges, and pooling of the best nodes."""
    import torch
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader
    from torch_geometric.nn import GCNConv, SAGEConv, TopKPooling, global_mean_pool

    class Model(torch.nn.Module):
        def __init__(self, width=256):
            super().__init__()
            self.first, self.pool, self.second = SAGEConv(64, width), TopKPooling(width, 0.5), GCNConv(width, width)
            self.head = torch.nn.Linear(width, 10)

        def forward(self, data):
            nodes = self.first(data.x, data.edge_index).relu()
            nodes, edges, _, batch, _, _ = self.pool(nodes, data.edge_index, batch=data.batch)
            return self.head(global_mean_pool(self.second(nodes, edges).relu(), batch))

    def graph(nodes):
        return Data(x=torch.randn(nodes, 64), edge_index=torch.randint(nodes, (2, 8 * nodes)), y=torch.randint(10, (1,)))

    loader = DataLoader([graph(100 + number) for number in range(setup.case.batch_size)], setup.case.batch_size)
    model = Model().to(setup.device)
    optimizer = torch.optim.Adam(model.parameters())
    setup.watch(model)
    kept = []
    while True:
        for data in loader:
            if PLANTED == "leak":
                kept.append(torch.ones(256, 1024, device=setup.device))  # planted leak
            held = torch.ones(8192, 1024, device=setup.device) if PLANTED == "tensor" else None  # planted tensor
            batch = data.to(setup.device)
            loss = torch.nn.functional.cross_entropy(model(batch), batch.y)
            loss.backward()
            del held
            if PLANTED == "below":
                torch.ones(8192, 1024, device=setup.device)  # planted below
            optimizer.step()
            optimizer.zero_grad()
            yield loss


def detection(setup):
    """Faster R-CNN of torchvision on images of different sizes, with different numbers of boxes."""
    import torch
    from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

    model = fasterrcnn_mobilenet_v3_large_320_fpn(weights=None, weights_backbone=None, num_classes=10).to(setup.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    setup.watch(model)
    kept = []

    def target(count):
        corners = torch.rand(count, 2, device=setup.device) * 100
        boxes = torch.cat([corners, corners + 10 + torch.rand(count, 2, device=setup.device) * 100], 1)
        return {"boxes": boxes, "labels": torch.randint(1, 10, (count,), device=setup.device)}

    while True:
        if PLANTED == "leak":
            kept.append(torch.ones(256, 1024, device=setup.device))  # planted leak
        held = torch.ones(16384, 1024, device=setup.device) if PLANTED == "tensor" else None  # planted tensor
        counts = range(setup.case.batch_size)
        images = [torch.rand(3, 240 + 20 * count, 320, device=setup.device) for count in counts]
        loss = sum(model(images, [target(1 + count) for count in counts]).values())
        loss.backward()
        del held
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        if PLANTED == "below":
            torch.ones(8192, 1024, device=setup.device)  # planted below
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def metric(setup):
    """Embeddings of pytorch-metric-learning: the number of pairs that its miner finds depends on values."""
    import torch
    from pytorch_metric_learning.losses import TripletMarginLoss
    from pytorch_metric_learning.miners import MultiSimilarityMiner

    layers = [torch.nn.Linear(512, 2048), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(2048, 128)]
    model = torch.nn.Sequential(*layers).to(setup.device)
    loss_of, miner = TripletMarginLoss(), MultiSimilarityMiner()
    optimizer = torch.optim.Adam(model.parameters())
    setup.watch(model)
    kept = []
    while True:
        if PLANTED == "leak":
            kept.append(torch.ones(256, 1024, device=setup.device))  # planted leak
        held = torch.ones(8192, 1024, device=setup.device) if PLANTED == "tensor" else None  # planted tensor
        embedded = model(torch.randn(setup.case.batch_size, 512, device=setup.device))
        labels = torch.randint(32, (setup.case.batch_size,), device=setup.device)
        loss = loss_of(embedded, labels, miner(embedded, labels))
        loss.backward()
        del held
        if PLANTED == "below":
            torch.ones(4096, 1024, device=setup.device)  # planted below
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def speech(setup):
    """Wav2Vec2 of transformers with the CTC loss, in a Trainer that accumulates gradients over two batches."""
    import torch
    from transformers import Trainer, TrainingArguments, Wav2Vec2Config, Wav2Vec2ForCTC

    class Own(Trainer):
        kept = ()

        def training_step(self, *args, **kwargs):
            if PLANTED == "leak":
                self.kept = (*self.kept, torch.ones(256, 1024, device=setup.device))  # planted leak
            held = torch.ones(16384, 1024, device=setup.device) if PLANTED == "tensor" else None  # planted tensor
            loss = super().training_step(*args, **kwargs)
            del held
            if PLANTED == "below":
                torch.ones(8192, 1024, device=setup.device)  # planted below
            return loss

    def collate(samples):
        pad = torch.nn.utils.rnn.pad_sequence
        sound = [sample["sound"] for sample in samples]
        return {
            "input_values": pad(sound, batch_first=True),
            "attention_mask": pad([torch.ones(len(one), dtype=torch.long) for one in sound], batch_first=True),
            "labels": pad([sample["labels"] for sample in samples], batch_first=True, padding_value=-100),
        }

    config = Wav2Vec2Config(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        conv_dim=(128,) * 7,
        vocab_size=32,
        mask_time_length=2,
        ctc_zero_infinity=True,
    )
    lengths = [4000 * (2 + number % 5) for number in range(64)]
    samples = [{"sound": torch.randn(length), "labels": torch.randint(1, 32, (length // 2000,))} for length in lengths]
    arguments = TrainingArguments(
        output_dir="out",
        per_device_train_batch_size=setup.case.batch_size,
        gradient_accumulation_steps=2,
        remove_unused_columns=False,
    )
    return Own(Wav2Vec2ForCTC(config), arguments, data_collator=collate, train_dataset=samples)


def grpo(setup):
    """GRPO of TRL: it generates texts, rewards them on the host, and trains on them."""
    import torch
    from datasets import Dataset
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    class Own(GRPOTrainer):
        kept = ()

        def training_step(self, *args, **kwargs):
            if PLANTED == "leak":
                self.kept = (*self.kept, torch.ones(256, 1024, device=setup.device))  # planted leak
            held = torch.ones(8192, 1024, device=setup.device) if PLANTED == "tensor" else None  # planted tensor
            loss = super().training_step(*args, **kwargs)
            del held
            if PLANTED == "below":
                torch.ones(4096, 1024, device=setup.device)  # planted below
            return loss

    config = Qwen2Config(
        vocab_size=8000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    arguments = GRPOConfig(
        output_dir="out",
        per_device_train_batch_size=setup.case.batch_size,
        num_generations=4,
        max_completion_length=12,
        bf16=True,
    )
    return Own(
        Qwen2ForCausalLM(config),
        lambda completions, **_: [float(len(completion)) for completion in completions],
        arguments,
        train_dataset=Dataset.from_dict({"prompt": [sentence() for _ in range(256)]}),
        processing_class=tokenizer(),
    )


def gan(setup):
    """A GAN in Lightning: two optimizers by hand, spectral norms, and a penalty on the critic's gradient."""
    import lightning
    import torch
    from torch import nn

    norm = nn.utils.parametrizations.spectral_norm

    class Gan(lightning.LightningModule):
        automatic_optimization = False
        kept = ()

        def __init__(self):
            super().__init__()
            up, down = nn.ConvTranspose2d, nn.Conv2d
            self.make = nn.Sequential(
                up(64, 128, 4), nn.ReLU(), up(128, 64, 8, 4, 2), nn.ReLU(), up(64, 3, 8, 4, 2), nn.Tanh()
            )
            critic = [norm(down(3, 64, 4, 2, 1)), nn.SiLU(), norm(down(64, 128, 4, 2, 1)), nn.SiLU(), nn.Flatten()]
            self.critic = nn.Sequential(*critic, norm(nn.Linear(128 * 16 * 16, 1)))

        def training_step(self, batch, index):
            for_maker, for_critic = self.optimizers()
            if PLANTED == "leak":
                self.kept = (*self.kept, torch.ones(256, 1024, device=self.device))  # planted leak
            held = torch.ones(8192, 1024, device=self.device) if PLANTED == "tensor" else None  # planted tensor
            made = self.make(torch.randn(len(batch), 64, 1, 1, device=self.device))
            mixed = (0.5 * batch + 0.5 * made.detach()).requires_grad_()
            (slope,) = torch.autograd.grad(self.critic(mixed).sum(), mixed, create_graph=True)
            penalty = slope.flatten(1).norm(dim=1).sub(1).square().mean()
            loss = self.critic(made.detach()).mean() - self.critic(batch).mean() + penalty
            self.manual_backward(loss)
            for_critic.step()
            for_critic.zero_grad()
            self.manual_backward(-self.critic(made).mean())
            del held
            for_maker.step()
            for_maker.zero_grad()
            for_critic.zero_grad()
            return loss

        def configure_optimizers(self):
            return [torch.optim.Adam(part.parameters(), betas=(0.0, 0.9)) for part in (self.make, self.critic)]

    if PLANTED == "below":
        torch.ones(12288, 1024, device=setup.device)  # planted below
    images = torch.utils.data.DataLoader(torch.randn(256, 3, 64, 64), batch_size=setup.case.batch_size)
    return lightning.Trainer(max_epochs=10), Gan(), images


def images(setup):
    """A vision transformer of timm with activation checkpointing, mixed batches, and an average of its weights."""
    import timm
    import torch
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.utils import ModelEmaV3

    model = timm.create_model("vit_tiny_patch16_224", num_classes=100, drop_path_rate=0.1).to(setup.device)
    model.set_grad_checkpointing()
    average, mix = ModelEmaV3(model), Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=100, label_smoothing=0.1)
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3)
    setup.watch(model)
    kept = []
    while True:
        if PLANTED == "leak":
            kept.append(torch.ones(256, 1024, device=setup.device))  # planted leak
        held = torch.ones(12288, 1024, device=setup.device) if PLANTED == "tensor" else None  # planted tensor
        batch = torch.randn(setup.case.batch_size, 3, 224, 224, device=setup.device)
        labels = torch.randint(100, (setup.case.batch_size,), device=setup.device)
        with torch.autocast("cuda", torch.bfloat16):
            batch, labels = mix(batch, labels)
            loss = SoftTargetCrossEntropy()(model(batch), labels)
        if PLANTED == "below":
            torch.ones(20480, 1024, device=setup.device)  # planted below
        loss.backward()
        del held
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)
        yield loss


def codes(setup):
    """An autoencoder with a codebook of vector-quantize-pytorch, which replaces codes that are never chosen."""
    import torch
    from torch import nn
    from vector_quantize_pytorch import VectorQuantize

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encode = nn.Sequential(nn.Conv2d(3, 128, 4, 4), nn.GELU(), nn.Conv2d(128, 128, 3, padding=1))
            self.codes = VectorQuantize(128, 1024, kmeans_init=True, threshold_ema_dead_code=2, accept_image_fmap=True)
            self.decode = nn.Sequential(nn.Conv2d(128, 128, 3, padding=1), nn.GELU(), nn.ConvTranspose2d(128, 3, 4, 4))

        def forward(self, images):
            chosen, _, commitment = self.codes(self.encode(images))
            return (self.decode(chosen) - images).square().mean() + commitment.mean()

    model = Model().to(setup.device)
    optimizer = torch.optim.AdamW(model.parameters())
    setup.watch(model)
    kept = []
    while True:
        if PLANTED == "leak":
            kept.append(torch.ones(256, 1024, device=setup.device))  # planted leak
        held = torch.ones(16384, 1024, device=setup.device) if PLANTED == "tensor" else None  # planted tensor
        loss = model(torch.randn(setup.case.batch_size, 3, 128, 128, device=setup.device))
        loss.backward()
        del held
        if PLANTED == "below":
            torch.ones(8192, 1024, device=setup.device)  # planted below
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def volumes(setup):
    """A 3D U-Net of monai in float16 with a scaled loss."""
    import torch
    from monai.losses import DiceCELoss
    from monai.networks.nets import UNet

    model = UNet(3, 1, 4, channels=(32, 64, 128), strides=(2, 2), num_res_units=1).to(setup.device)
    loss_of = DiceCELoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    setup.watch(model)
    kept = []
    while True:
        if PLANTED == "leak":
            kept.append(torch.ones(256, 1024, device=setup.device))  # planted leak
        held = torch.ones(16384, 1024, device=setup.device) if PLANTED == "tensor" else None  # planted tensor
        volume = torch.randn(setup.case.batch_size, 1, 64, 64, 64, device=setup.device)
        labels = torch.randint(4, volume.shape, device=setup.device)
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(model(volume), labels)
        scaler.scale(loss).backward()
        del held
        scaler.unscale_(optimizer)
        if PLANTED == "below":
            torch.ones(8192, 1024, device=setup.device)  # planted below
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield loss


def tagger(setup):
    """A tagger by an LSTM on packed sentences and a conditional random field of pytorch-crf, with masks."""
    import torch
    from torch import nn
    from torchcrf import CRF

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(5000, 128)
            self.lstm = nn.LSTM(128, 256, batch_first=True, bidirectional=True)
            self.head, self.crf = nn.Linear(512, 16), CRF(16, batch_first=True)

        def forward(self, words, tags, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(self.words(words), lengths, batch_first=True, enforce_sorted=False)
            read, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
            return -self.crf(self.head(read), tags, mask=words != 0)

    model = Model().to(setup.device)
    optimizer = torch.optim.Adam(model.parameters())
    setup.watch(model)
    kept = []
    lengths = torch.tensor([8 + number % 33 for number in range(setup.case.batch_size)])
    while True:
        if PLANTED == "leak":
            kept.append(torch.ones(256, 1024, device=setup.device))  # planted leak
        held = torch.ones(8192, 1024, device=setup.device) if PLANTED == "tensor" else None  # planted tensor
        words = torch.randint(1, 5000, (len(lengths), 40)) * (torch.arange(40) < lengths[:, None])
        tags = torch.randint(16, words.shape)
        loss = model(words.to(setup.device), tags.to(setup.device), lengths)
        loss.backward()
        del held
        if PLANTED == "below":
            torch.ones(8192, 1024, device=setup.device)  # planted below
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def sentence():
    return " ".join(f"w{random.randrange(900)}" for _ in range(random.randrange(12, 32)))


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[EOS]", "[UNK]", *(f"w{number}" for number in range(900))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")


CASES = {
    contrastive: {"batch_size": 256},
    ppo: {"batch_size": 512},
    graphs: {"batch_size": 64},
    detection: {"batch_size": 2},
    metric: {"batch_size": 32},
    speech: {"batch_size": 4, "gradient_accumulation": 2},
    grpo: {"batch_size": 128, "precision": "bf16-amp"},
    gan: {"batch_size": 32},
    images: {"batch_size": 64, "precision": "bf16-amp"},
    codes: {"batch_size": 16},
    volumes: {"batch_size": 2, "precision": "fp16-amp"},
    tagger: {"batch_size": 256},
}


@pytest.mark.parametrize("program", CASES, ids=lambda program: program.__name__)
def test_program(gputrain, program):
    gputrain.check(program, **{"precision": "fp32", **CASES[program]})
