"""Implements the model PanGu-alpha (arXiv:2104.12369): GPT-2's blocks, then one whose queries come from a table of
positions.

After sunzeyeah/RLHF src/resources/models/pangu-350M/modeling_gptpangu.py, whose benchmark the published table is, but for
the attention: there the scores are a tensor, here torch's scaled_dot_product_attention keeps them inside where it can.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

INITIAL_DEVIATION: Final = 0.02
"""GPT-2's, of all matrices and tables."""


class PanGu(nn.Module):
    """PanGu-alpha: maps token ids (batch, sequence) int64 to logits (batch, sequence, vocabulary).

    Args:
        num_hidden_layers: the query layer included.
        dropout: share of embeddings, attention weights and outputs of attention and MLP that is dropped.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_position_embeddings: int,
        hidden_size: int,
        intermediate_size: int,
        num_hidden_layers: int,
        num_attention_heads: int,
        dropout: float,
        layer_norm_eps: float,
    ) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, hidden_size)
        self.wpe = nn.Embedding(max_position_embeddings, hidden_size)
        self.wqe = nn.Embedding(max_position_embeddings, hidden_size)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(hidden_size, intermediate_size, num_attention_heads, dropout, layer_norm_eps)
            for _ in range(num_hidden_layers)
        )
        self.ln_f = nn.LayerNorm(hidden_size, eps=layer_norm_eps)
        self._initialise()

    def _initialise(self) -> None:
        """Initialise by GPT-2's scheme: what ends in the residual stream starts smaller, the deeper the model."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.ndim > 1:
                ends_in_residual = name.endswith("c_proj.weight")
                nn.init.normal_(
                    parameter, std=INITIAL_DEVIATION / (math.sqrt(2 * len(self.blocks)) if ends_in_residual else 1)
                )

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.dropout(self.wte(ids) + self.wpe(positions))
        *blocks, query_layer = self.blocks
        for block in blocks:
            hidden = block(hidden)
        # The final norm comes before the query layer. The head shares the weights of the word embedding.
        hidden = query_layer(self.ln_f(hidden), self.wqe(positions).expand_as(hidden))
        logits: Tensor = functional.linear(hidden, self.wte.weight)
        return logits


class Block(nn.Module):
    """Pre-norm attention and MLP on hidden states (batch, sequence, hidden)."""

    def __init__(self, hidden_size: int, intermediate_size: int, heads: int, dropout: float, eps: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(hidden_size, eps=eps)
        self.attention = Attention(hidden_size, heads, dropout)
        self.ln_2 = nn.LayerNorm(hidden_size, eps=eps)
        self.mlp = Mlp(hidden_size, intermediate_size, dropout)

    def forward(self, hidden: Tensor, queries: Tensor | None = None) -> Tensor:
        hidden = hidden + self.attention(self.ln_1(hidden), queries)
        result: Tensor = hidden + self.mlp(self.ln_2(hidden))
        return result


class Attention(nn.Module):
    """Causal attention; queries come from the states themselves, or from ``queries`` of the same shape."""

    def __init__(self, hidden_size: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(hidden_size, hidden_size)
        self.k_proj = nn.Linear(hidden_size, hidden_size)
        self.v_proj = nn.Linear(hidden_size, hidden_size)
        self.c_proj = nn.Linear(hidden_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor, queries: Tensor | None = None) -> Tensor:
        query = self._split(self.q_proj(states if queries is None else queries))
        key, value = self._split(self.k_proj(states)), self._split(self.v_proj(states))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout.p if self.training else 0.0
        )
        result: Tensor = self.dropout(self.c_proj(mixed.transpose(1, 2).flatten(2)))
        return result

    def _split(self, states: Tensor) -> Tensor:
        """Reshape (batch, sequence, hidden) to (batch, heads, sequence, hidden / heads)."""
        heads: Tensor = states.unflatten(2, (self.heads, -1)).transpose(1, 2)
        return heads


class Mlp(nn.Module):
    """Two layers with the exact GELU (by the error function) between them."""

    def __init__(self, hidden_size: int, intermediate_size: int, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(hidden_size, intermediate_size)
        self.c_proj = nn.Linear(intermediate_size, hidden_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: Tensor) -> Tensor:
        result: Tensor = self.dropout(self.c_proj(functional.gelu(self.c_fc(states))))
        return result
