"""A sentence-transformers model of random weights, that reads texts letter by letter."""

from __future__ import annotations

import tempfile
from typing import Any

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast, set_seed


def tiny_model(width: int = 128, dropout: float = 0.1) -> Any:
    words = ["[PAD]", "[UNK]", *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split("", "isolated")
    set_seed(0)
    config = BertConfig(
        vocab_size=len(words), hidden_size=width, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=2 * width, max_position_embeddings=128,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=128
        ).save_pretrained(folder)
        BertModel(config).save_pretrained(folder)
        encoder = modules.Transformer(folder)
    return SentenceTransformer(modules=[encoder, modules.Pooling(width)], device="cpu")
