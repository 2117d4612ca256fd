"""Embeddings of sentences by sentence-transformers, whose cached loss computes each part of a batch twice."""

import tempfile

import torch
from planted import FOREACH, evaluate, plant
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling, Transformer
from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss
from transformers import BertConfig, BertModel
from vocabulary import sentence, tokenizer


def train(setup):
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
        BertModel(BertConfig(vocab_size=1000, **sizes)).save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        words = Transformer(folder)
    model = SentenceTransformer(modules=[words, Pooling(64)], device=str(setup.device))
    loss_of = CachedMultipleNegativesRankingLoss(model, mini_batch_size=16)
    optimizer = torch.optim.AdamW(model.parameters(), **FOREACH)
    plant(words.model.encoder.layer[0].output.dense, optimizer)
    setup.watch(model, idle=["*.pooler.*"])

    def loss_of_batch():
        pairs = [model.tokenize([sentence() for _ in range(setup.case.batch_size)]) for _ in range(2)]
        pairs = [{name: value.to(setup.device) for name, value in each.items() if name != "modality"} for each in pairs]
        return loss_of(pairs, None)

    setup.evaluation(lambda: evaluate(model, loss_of_batch))
    while True:
        loss = loss_of_batch()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
