"""Reads the architecture facts of every model that the zoo can build: pytest and the worker both need them.

One file a family, named as the module of `pytest_gputrain.worker.zoo` that builds it. A model is one entry: the classes
and hyper-parameters of its parts, the keys that replace them at tiny scale, what each method trains, and the counts
of parameters that a build is checked against.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

from pytest_gputrain.records import Scale


class Part(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One network of a model."""

    library: Literal["transformers", "diffusers", "own"]
    """The library of the class; ``own`` for one of the family's module."""
    model_class: str = ""
    """The class of the library. Empty if ``config`` names it, as a config.json does: the worker then completes the facts."""
    config_class: str = ""
    """The config's class in transformers."""
    parameters: dict[Scale, int]
    """Count by scale, tied ones once: the published one at full size."""
    source: str
    """Public place the hyper-parameters were taken from."""
    config: dict[str, Any]
    tiny: dict[str, Any] = {}
    """Keys that replace those of ``config`` for a step on a CPU through the same code path."""

    def facts(self, scale: Scale) -> dict[str, Any]:
        """Return the hyper-parameters at this scale."""
        return self.config if scale == "full" else {**self.config, **self.tiny}

    @property
    def language(self) -> dict[str, Any]:
        """The keys of ``config`` that describe its language model."""
        return language_config(self.config)


LANGUAGE_KEYS: Final = ("thinker_config", "text_config", "llm_config", "language_config")
"""Keys that hold the language model of a config of more than text."""


def language_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a config.json that describes its language model; without such a part, the whole config."""
    inner = next((config[key] for key in LANGUAGE_KEYS if isinstance(config.get(key), dict)), None)
    return config if inner is None else language_config(inner)


class Lora(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The published LoRA recipe (arXiv:2106.09685) of a model."""

    rank: int
    alpha: int
    dropout: float
    targets: tuple[str, ...] | str
    """Ends of the names of the adapted layers, or one regular expression for whole names, as peft takes them. Never shared
    between families, where they would match nothing. ``all-linear`` for all linear layers but the head; none for peft's own
    default for models of the type."""


class Architecture(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model of the zoo."""

    title: str
    """The name of the model as published tables print it."""
    family: str = ""
    """Module of `pytest_gputrain.worker.zoo` that builds it: the name of the file it was read from."""
    needs: tuple[Literal["sequence_length", "resolution", "frames"], ...] = ()
    """Fields of a case that must be set."""
    trainable: dict[str, dict[Scale, int]]
    """Parameters that train, by method and scale: the methods that the model has."""
    trains: dict[str, tuple[str, ...]] = {}
    """Methods that train only what begins with one of these names; the others train everything (or adapters)."""
    idle: dict[Scale, tuple[str, ...]] = {}
    """Regular expressions, by scale, for whole names of trained parameters that get no gradient by construction."""
    lora: Lora | None = None
    """Absent where no method adapts."""
    blocks: tuple[str, ...] = ()
    """Paths of the lists of blocks that activation checkpointing recomputes, in the order in which they run."""
    step: dict[str, Any] = {}
    """Facts of the training step that the family's module reads."""
    loss: Literal["fp32", "logits"] = "logits"
    """The loss of a language model whose case names none."""
    parts: dict[str, Part]
    """The first is what trains; the others run in the forward pass, frozen."""

    @property
    def trained_part(self) -> Part:
        return next(iter(self.parts.values()))

    @property
    def is_whole(self) -> bool:
        """Whether the model is a whole vision-language model that a config.json describes."""
        return self.family == "vision_language" and not self.trains


def with_layers(config: dict[str, Any], key: str, layers: int) -> dict[str, Any]:
    """Return the config with that many layers, counted by ``key``. Lists and dictionaries that have an entry for each layer
    are cut to match."""
    before = config[key]
    cut: dict[str, Any] = {}
    for name, value in config.items():
        if layers >= before:
            break
        if isinstance(value, list) and len(value) == before:
            cut[name] = value[:layers]
        elif isinstance(value, dict) and value and all(number.isdecimal() and int(number) < before for number in value):
            cut[name] = {number: entry for number, entry in value.items() if int(number) < layers}
    return {**config, **cut, key: layers}


class Published(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model of the zoo that its published config.json describes."""

    title: str
    published: str
    """The number of parameters as published: ``8,190,735,360``, or less precisely ``8.1B``."""
    source: str
    targets: tuple[str, ...] | str = "all-linear"
    """The layers that LoRA adapts; ``all-linear`` for all linear layers but the head."""
    config: dict[str, Any]

    @property
    def parameters(self) -> int | None:
        """The published count, if it is exact to the last parameter."""
        return int(self.published.replace(",", "")) if "," in self.published else None


class Denoiser(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class of denoisers of diffusers that a config.json alone describes."""

    pipeline: str
    """The pipeline of diffusers that decides the shapes of latents, texts and further inputs."""
    needs: tuple[Literal["resolution", "frames"], ...] = ("resolution",)
    targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    """The layers that LoRA adapts: by default those that the training scripts of diffusers adapt in most models."""
    blocks: tuple[str, ...] = ()
    """As of `Architecture`; ``down_blocks`` first for a UNet, and none if diffusers recomputes nothing."""
    idle: tuple[str, ...] = ()
    """As of `Architecture`; ``{last}`` stands for the number of the last of ``num_layers``."""
    step: dict[str, Any]
    tiny: dict[str, Any]

    def architecture(self, model_class: str) -> Architecture:
        """Return the facts of a model of this class."""
        part = Part(
            library="diffusers",
            model_class=model_class,
            parameters={},
            source=self.pipeline,
            config={},
            tiny=self.tiny,
        )
        return Architecture(
            title=model_class,
            family=_DENOISERS.stem,
            needs=self.needs,
            trainable={},
            idle={"full": self.idle, "tiny": self.idle},
            lora=Lora(rank=8, alpha=8, dropout=0.0, targets=self.targets),
            blocks=self.blocks,
            step=self.step,
            parts={"denoiser": part},
        )


def configured(
    title: str, config: dict[str, Any], source: str, parameters: int | None = None, lora: Lora | None = None
) -> Architecture:
    """Return the facts of a model from its config.json alone.

    What only the class in the library knows, the worker adds: class, scale for a CPU, blocks and default targets of LoRA.
    How a denoiser of diffusers trains is taken from the first model of the zoo that has the same class, or from its class.
    """
    part = Part(
        library="diffusers" if isinstance(config.get("_class_name"), str) else "transformers",
        parameters={} if parameters is None else {"full": parameters},
        source=source,
        config=config,
    )
    if part.library == "diffusers":
        like = denoisers()[config["_class_name"]]
        name, *_ = like.parts
        return msgspec.structs.replace(
            like, title=title, trainable={"full": {}, "lora": {}}, trains={}, idle={}, parts={name: part}
        )
    return Architecture(
        title=title,
        family="vision_language" if "vision_config" in config else "language",
        needs=("sequence_length",),
        trainable={"full": {}, "lora": {}, "qlora": {}},
        lora=lora or Lora(rank=8, alpha=8, dropout=0.0, targets=()),
        blocks=("",),
        loss="fp32",  # These models are mostly trained with transformers, which computes the loss in fp32.
        parts={"model": part},
    )


@functools.cache
def denoisers() -> dict[str, Architecture]:
    """Return each class of diffusers that a model may have, with the facts of its first model in the zoo or of the class."""
    models = [model for model in _families().values() if model.trained_part.library == "diffusers"]
    classes = msgspec.json.decode(_DENOISERS.read_bytes(), type=dict[str, Denoiser])
    return {
        **{name: known.architecture(name) for name, known in classes.items()},
        **{model.trained_part.model_class: model for model in reversed(models)},
    }


_PUBLISHED: Final = Path(__file__).with_name("published.json")
_DENOISERS: Final = Path(__file__).with_name("denoiser.json")


@functools.cache
def _families() -> dict[str, Architecture]:
    return {
        name: msgspec.structs.replace(architecture, family=path.stem)
        for path in sorted(Path(__file__).parent.glob("*.json"))
        if path not in (_PUBLISHED, _DENOISERS)
        for name, architecture in msgspec.json.decode(path.read_bytes(), type=dict[str, Architecture]).items()
    }


@functools.cache
def architectures() -> dict[str, Architecture]:
    """Return every model by its name, family after family, and then those that only their config.json describes."""
    facts = dict(_families())
    for name, model in msgspec.json.decode(_PUBLISHED.read_bytes(), type=dict[str, Published]).items():
        recipe = Lora(rank=8, alpha=16, dropout=0.0, targets=model.targets)  # PEFT refuses dropout for adapters of experts.
        facts[name] = configured(model.title, model.config, model.source, model.parameters, recipe)
    return facts
