"""Sentences of random words, and their tokenizer."""

import random

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def sentence(words=None):
    return " ".join(f"w{random.randrange(900)}" for _ in range(words or random.randrange(12, 32)))


def tokenizer():
    words = ["[PAD]", "[EOS]", "[UNK]", *(f"w{number}" for number in range(900))]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]")
