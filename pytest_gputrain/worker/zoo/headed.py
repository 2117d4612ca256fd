"""Builds language models of transformers, also those that it has only as a part of a model that takes images or sounds."""

from __future__ import annotations

import importlib
import itertools
import re
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from pytest_gputrain.cases.architectures.facts import Part


def language_model(part: Part, facts: dict[str, Any]) -> nn.Module:
    """Build a model with random weights, and add a head if its class has none."""
    import transformers

    config = getattr(transformers, part.config_class)(**facts)
    model: nn.Module = model_class(part)(config)
    keep_in_fp32(model)
    return model


def keep_in_fp32(model: Any) -> None:
    """Store in fp32 the parameters that transformers keeps in fp32 when it loads a model in 16 bits, such as most
    routers."""
    names = getattr(model, "_keep_in_fp32_modules_strict", None)
    dtype = torch.get_default_dtype()
    if not names or dtype == torch.float32:
        return
    kept = re.compile("|".join(name.replace("*", ".*") for name in names))
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        if value.dtype == dtype and kept.search(name):
            value.data = value.data.float()


def model_class(part: Part) -> Any:
    """Return the class of a part of transformers. A text model without a head gets a class that has one."""
    import transformers

    # The package does not export all text models.
    found = getattr(transformers, part.model_class, None)
    found = found or getattr(_module_of(getattr(transformers, part.config_class)), part.model_class)
    return found if _has_head(found) else _with_head(found)


def text_models(config_class: Any) -> list[str]:
    """Return the names of the classes that transformers builds from such a config: those with a head first."""
    from transformers import PreTrainedModel

    classes: list[Any]
    try:
        module = _module_of(config_class)
    except ImportError:
        return []
    classes = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, PreTrainedModel)]
    found = [
        value
        for value in classes
        if value.__module__ == module.__name__
        and value.config_class is config_class
        and not value.__name__.endswith("PreTrainedModel")
        and "Encoder" not in value.__name__  # an encoder predicts no next token
        and ("ForCausalLM" in value.__name__ or not _has_head(value))
    ]
    return [each.__name__ for each in sorted(found, key=_has_head, reverse=True)]


def _module_of(config_class: Any) -> Any:
    return importlib.import_module(config_class.__module__.replace(".configuration_", ".modeling_"))


def _has_head(model_class: Any) -> bool:
    from transformers import GenerationMixin

    return issubclass(model_class, GenerationMixin)


def _with_head(text_model: type[Any]) -> type[Any]:
    """Return a class that has a text model and the head that its multimodal model has: a linear layer, tied on request."""
    base: Any = text_model.__mro__[1]

    class WithHead(base):  # type: ignore[misc, valid-type, unused-ignore]
        _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.model = text_model(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head

        def forward(self, **inputs: Any) -> Any:
            hidden: Tensor = self.model(**inputs).last_hidden_state
            return SimpleNamespace(logits=self.lm_head(hidden))

    WithHead.__name__ = f"{text_model.__name__}WithHead"
    return WithHead
