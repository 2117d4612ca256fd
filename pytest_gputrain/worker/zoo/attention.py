"""Gives transformers' models the attention that a case names."""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor, nn
from torch.nn import functional

_OLD: Final = "transformers_4_49"
"""The name of the old attention. It lacks the word sdpa, which transformers refuses for a model whose scores are capped."""


def named_attention(attention: str) -> str:
    """Return the name that ``attention`` of a case has among transformers' own."""
    if attention != "sdpa-4.49":
        return attention
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_OLD, _sdpa_of_4_49)
    AttentionMaskInterface.register(_OLD, sdpa_mask)
    return _OLD


def _sdpa_of_4_49(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **ignored: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers 4.49 did: over keys and values repeated for the heads that share them, in every type, and
    without the cap that Gemma 2 passes as ``softcap``.
    """
    from transformers.integrations.sdpa_attention import repeat_kv

    key, value = (repeat_kv(part, query.shape[1] // key.shape[1]) for part in (key, value))
    query, key, value = (part.contiguous() for part in (query, key, value))
    result = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=attention_mask is None,
    )
    return result.transpose(1, 2).contiguous(), None
