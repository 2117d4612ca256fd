"""Completes what a config.json tells of a model: its class, blocks and scale for a CPU.

What is found is what the facts of the zoo's other models state, so that nothing else needs to know where a model is from.
"""

from __future__ import annotations

import copy
import difflib
import functools
import inspect
import json
from collections.abc import Collection, Sequence
from typing import Any, Final

import msgspec
import torch
from torch import nn

from pytest_gputrain.cases.architectures.facts import (
    Architecture,
    Part,
    architectures,
    denoisers,
    language_config,
    with_layers,
)
from pytest_gputrain.records import Scale
from pytest_gputrain.utils.suggest import did_you_mean
from pytest_gputrain.worker.checks import CheckFailed, described
from pytest_gputrain.worker.zoo.headed import language_model, text_models
from pytest_gputrain.worker.zoo.tiny import tiny_denoiser, tiny_language_model, tiny_vision_language_model
from pytest_gputrain.worker.zoo.vision_language import IMAGES

_REQUIRED: Final = ("num_hidden_layers", "hidden_size")
"""Keys without which a class would silently build a model of its own defaults."""

_COUNTS: Final = {
    "num_hidden_layers": 2000,
    "hidden_size": 10**6,
    "vocab_size": 10**8,
    "num_attention_heads": 10**5,
    "num_key_value_heads": 10**5,
    "intermediate_size": 10**7,
}
"""Keys that are counts, and the most that is built. Classes take others without complaint, and there would be a figure."""

_OF_FILES: Final = ("model_type", "transformers_version", "dtype")
"""Keys that a class writes into a file and takes nothing from."""

_OF_OTHER_INPUTS: Final = {"vision_config", "audio_config"}
"""Parts of a class that reads images or sounds."""

SCALES: Final[tuple[Scale, ...]] = ("full", "tiny")

_IDLE: Final = (r".*\.(k_proj|key)\.bias", r".*\.indexer\..*")
"""Biases of keys: without rotary positions they move all scores of a query alike, and get no gradient. Indexers only choose
which tokens are attended to: DeepSeek trains them by a loss of their own, which transformers does not have."""


_IDLE_OF_TOWERS: Final = (r".*\.vision_tower\..*",)
"""Towers that transformers has as models of their own: they may have a head or last layers whose results nothing reads."""


def architecture_of(name: str) -> Architecture:
    """Return the complete facts of a model of the zoo, or of a model that its config describes.

    Raises:
        CheckFailed: the library has no such model, or its config lacks a key.
    """
    architecture = architectures()[name]
    return architecture if architecture.trained_part.model_class else _completed(name)


@functools.cache
def _completed(name: str) -> Architecture:
    architecture = architectures()[name]
    complete = _denoiser
    if architecture.trained_part.library == "transformers":
        complete = _whole_model if architecture.is_whole else _language_model
    try:
        return complete(name, architecture)
    except CheckFailed:
        raise
    except Exception as error:
        part = architecture.trained_part
        if isinstance(error, KeyError) and (key := _key_of(part.config, error.args[0])):
            raise CheckFailed(
                f"{name} has {key}={error.args[0]!r} in its config.json, a value that {part.library} does not know"
            ) from error
        raise CheckFailed(f"{name} cannot be built from its config.json: {described(error)}") from error


def _key_of(config: dict[str, Any], value: object) -> str | None:
    """Return the key with this value, such as ``rope_scaling.rope_type``; None if no key has it."""
    for key, given in config.items():
        if given == value or (isinstance(given, list) and value in given):
            return key
        if isinstance(given, dict) and (inner := _key_of(given, value)):
            return f"{key}.{inner}"
    return None


def _language_model(name: str, architecture: Architecture) -> Architecture:
    part = architecture.trained_part
    stated, given, config_class = _stated(name, part.config)
    model_class = _class_of(name, config_class, alone=stated is given)
    _check_spelling(name, config_class, stated)
    for key in _REQUIRED if stated is given else ():
        if not _is_told(config_class, key, given.keys()):
            if not hasattr(config_class, config_class.attribute_map.get(key, key)):
                kind: str = part.config["model_type"]
                raise CheckFailed(
                    f"{name} has model_type={kind!r}, whose class {config_class.__name__} has no {key}, so it is not known "
                    "how to count and recompute its blocks; train it as own code"
                )
            raise CheckFailed(f"{name} lacks the key {key} in its config.json, so its size is not known; add it")
    names: dict[str, str] = config_class.attribute_map
    _check_counts(name, stated, names)
    given, config = _config(config_class, config_class._decode_special_floats(given))
    layers_key = _layers_key(config)
    layers: int = getattr(config, layers_key)
    if layers_key in given and given[layers_key] != layers:
        raise CheckFailed(
            f"{name} has {layers_key}={given[layers_key]!r} in its config.json, but {config_class.__name__} makes it "
            f"{layers} of the other keys; how it is built is not known"
        )
    # A value that the class adds by itself is kept, because other values may depend on it.
    facts = {**given, layers_key: layers, "vocab_size": config.vocab_size}
    if layers_key in _sources(config_class, "num_hidden_layers"):
        facts.pop("num_hidden_layers", None)
    per_layer = None if _is_computed(config_class, "layer_types") else getattr(config, "layer_types", None)
    if isinstance(per_layer, list):
        facts[names.get("layer_types", "layer_types")] = list(per_layer)
    completed = msgspec.structs.replace(part, model_class=model_class, config_class=config_class.__name__, config=facts)
    model = _on_meta(completed)
    path, blocks = _blocks(name, model, layers)
    kinds = _kinds(blocks, facts)
    completed = msgspec.structs.replace(
        completed,
        parameters={"full": sum(value.numel() for value in model.parameters()), **part.parameters},
        tiny=tiny_language_model(config, with_layers(facts, layers_key, _fewest(kinds)), facts),
    )
    return msgspec.structs.replace(
        architecture,
        parts={"model": completed},
        blocks=(path,),
        idle={"full": _IDLE, "tiny": _IDLE},
    )


def _whole_model(name: str, architecture: Architecture) -> Architecture:
    """Return the complete facts of a vision-language model of which all networks train."""
    import transformers
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    part = architecture.trained_part
    given = {key: value for key, value in copy.deepcopy(part.config).items() if key != "model_type"}
    kind: str = part.config["model_type"]
    known: dict[str, str] = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    model_class = known.get(kind, "")
    if model_class not in IMAGES:
        raise CheckFailed(
            f"{name} has model_type={kind!r}, for which no images are made; leave part='all' out to train its language "
            f"model (images are made for {', '.join(each for each in known if known[each] in IMAGES)})"
        )
    config_class: Any = CONFIG_MAPPING[kind]
    config = config_class(**config_class._decode_special_floats(given))
    text = config.get_text_config(decoder=True)
    for network, stated in ((text, language_config(part.config)), (config.vision_config, part.config["vision_config"])):
        _check_spelling(name, type(network), stated)
        _check_counts(name, stated, type(network).attribute_map)
    written: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    facts = {key: value for key, value in written.items() if key not in _OF_FILES}
    for each in (facts, *(value for value in facts.values() if isinstance(value, dict))):
        for key in ("id2label", "label2id"):
            each.pop(key, None)
    completed = msgspec.structs.replace(part, model_class=model_class, config_class=config_class.__name__, config=facts)
    with torch.device("meta"):
        model = getattr(transformers, model_class)(config)
    model.tie_weights()
    blocks = tuple(
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and all(isinstance(block, GradientCheckpointingLayer) for block in module)
    )
    layers = _fewest(_kinds(model.get_submodule(blocks[-1]), facts["text_config"]))
    shallow = with_layers(facts["text_config"], "num_hidden_layers", layers)
    completed = msgspec.structs.replace(
        completed,
        parameters={"full": sum(value.numel() for value in model.parameters())},
        tiny=tiny_vision_language_model(facts, tiny_language_model(text, shallow, facts["text_config"])),
    )
    idle = dict.fromkeys(SCALES, (*_IDLE, *_IDLE_OF_TOWERS))
    return msgspec.structs.replace(architecture, parts={"model": completed}, blocks=blocks, idle=idle)


def _stated(name: str, config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Return what a config says of its language model, what transformers makes of it, and the class for it.

    Both are one dictionary for a model of text alone.

    Raises:
        CheckFailed: transformers does not know the model.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # The dictionary is copied, because classes write into the dictionaries that they get.
    stated = {key: value for key, value in copy.deepcopy(language_config(config)).items() if key != "model_type"}
    kind: str = config["model_type"]
    if kind not in CONFIG_MAPPING and language_config(config) is not config:
        # A model class that only the hub has may contain a language model that transformers has.
        kind = language_config(config).get("model_type", kind)
        config = language_config(config)
    config_class: Any = CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else _by_architectures(name, kind, config)
    if not config_class.sub_configs:
        return stated, stated, config_class
    without_type = {key: value for key, value in copy.deepcopy(config).items() if key != "model_type"}
    _check_spelling(name, config_class, without_type)
    whole = config_class(**config_class._decode_special_floats(without_type))
    text = whole.get_text_config(decoder=True)
    if text is not whole:
        given = {key: value for key, value in text.to_diff_dict().items() if key not in _OF_FILES}
        # The config of the part with the head says whether embeddings are tied. In a model that also takes images, this is
        # the config of the whole model.
        holders: tuple[Any, ...] = (whole, getattr(whole, "thinker_config", None), text)
        tied = next((one.tie_word_embeddings for one in holders if hasattr(one, "tie_word_embeddings")), False)
        return stated, {**given, "tie_word_embeddings": tied}, type(text)
    if _OF_OTHER_INPUTS & config_class.sub_configs.keys():
        raise CheckFailed(
            f"{name} has model_type={kind!r}, whose language model transformers does not separate from what reads images or "
            "sounds"
        )
    return stated, stated, config_class


def _by_architectures(name: str, kind: str, config: dict[str, Any]) -> Any:
    """Return the class for a config whose ``model_type`` only the hub has, if the config names a class of transformers.

    Raises:
        CheckFailed: it names none.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = config.get("architectures")
    for known, model_class in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if isinstance(named, list) and model_class in named:
            return CONFIG_MAPPING[known]
    raise CheckFailed(
        f"{name} has model_type={kind!r}, which transformers {transformers.__version__} does not have"
        f"{did_you_mean(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)}; install a release that has it: code that a config names "
        "by auto_map is never run"
    )


def _class_of(name: str, config_class: Any, *, alone: bool) -> str:
    """Return the name of the class for causal language modelling; without one, of the text model that gets a head.

    Args:
        alone: whether it is no part of a model that takes images or sounds.

    Raises:
        CheckFailed: transformers has neither.
    """
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    kind: str = config_class.model_type
    if kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])
        found = text_models(config_class)
        # Mistral 4 is an exception: its type stands for the whole model.
        if found and (not alone or found[0].endswith("ForCausalLM")):
            return found[0]
    raise CheckFailed(
        f"{name} has model_type={kind!r}, which in transformers {transformers.__version__} is not a decoder-only language "
        "model"
    )


def _check_spelling(name: str, config_class: Any, given: dict[str, Any]) -> None:
    """Check that no count and no network is misspelt, because a class ignores unknown keys and uses its defaults.

    Raises:
        CheckFailed: a key is nearly the name of a count, or of the config of a network, that is not given.
    """
    known = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    absent = {config_class.attribute_map.get(key, key) for key in _COUNTS}.union(config_class.sub_configs) - given.keys()
    for key in given:
        near = difflib.get_close_matches(key, sorted(absent), n=1, cutoff=0.85)
        if near and key not in known and not hasattr(config_class, key):
            raise CheckFailed(
                f"{name} has the key {key} in its config.json, which {config_class.__name__} does not know and would ignore "
                f"(did you mean {near[0]!r}?)"
            )


def _check_counts(name: str, given: dict[str, Any], names: dict[str, str]) -> None:
    """Check the counts for which a class would accept any value.

    Args:
        names: what the class calls the keys.

    Raises:
        CheckFailed: one of them is no count, or so large that nobody could build the model, or two do not belong together.
    """
    counts: dict[str, int] = {}
    for common, most in _COUNTS.items():
        for key in {common, names.get(common, common)} & given.keys():
            value = given[key]
            if common not in _REQUIRED and (value is None or isinstance(value, list)):
                continue  # The class of the model reads both forms.
            if type(value) is not int or not 1 <= value <= most:
                raise CheckFailed(
                    f"{name} has {key}={_as_written(value)} in its config.json; it must be a whole number from 1 to {most:,}"
                )
            counts[common] = value
    heads, key_heads = counts.get("num_attention_heads", 0), counts.get("num_key_value_heads", 1)
    if heads % key_heads:
        raise CheckFailed(
            f"{name} has num_attention_heads={heads} in its config.json, which is no multiple of "
            f"num_key_value_heads={key_heads}"
        )


def _as_written(value: Any) -> str:
    """Return a value as the file has it. Strings are in Python's quotes, as in all other sentences."""
    if isinstance(value, dict) and value.keys() == {"__float__"}:  # `model_config` stores a NaN so.
        return str(value["__float__"])
    return repr(value) if isinstance(value, str) else json.dumps(value)


def _config(config_class: Any, given: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return the keys that a class accepts, and the config that it makes of them.

    A class writes keys that it derives of others; when it reads them, it translates some of them (an older form of a list
    of layers), and takes no value for the others.
    """
    try:
        return given, config_class(**copy.deepcopy(given))
    except AttributeError:
        given = {key: value for key, value in given.items() if not _is_computed(config_class, key)}
        return given, config_class(**copy.deepcopy(given))


def _layers_key(config: Any) -> str:
    """Return the key that counts the model's blocks. It is another one if ``num_hidden_layers`` follows from it."""
    key: str = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return next((source for source in sorted(_sources(type(config), key)) if type(getattr(config, source)) is int), key)


def _is_told(config_class: Any, key: str, given: Collection[str]) -> bool:
    """Tell whether the given keys contain a key under any of its names, or a key from which the class derives it."""
    sources = _sources(config_class, key)
    own = config_class.attribute_map.get(key, key)
    return key in given or own in given or any(name in sources or _sources(config_class, name) & sources for name in given)


def _sources(config_class: Any, key: str) -> set[str]:
    """Return the keys from which a class derives a key; none if the class uses the key as it is."""
    names: dict[str, str] = config_class.attribute_map
    found = getattr(config_class, names.get(key, key), None)
    if not isinstance(found, property) or found.fget is None:
        return set()
    return {names.get(name, name) for name in found.fget.__code__.co_names} & {*inspect.signature(config_class).parameters}


def _is_computed(config_class: Any, key: str) -> bool:
    """Tell whether a class computes a key from others instead of taking a value for it."""
    found = getattr(config_class, config_class.attribute_map.get(key, key), None)
    return isinstance(found, property) and found.fset is None


def _denoiser(name: str, architecture: Architecture) -> Architecture:
    import diffusers

    (part_name, part), *_ = architecture.parts.items()
    model_class: str = part.config["_class_name"]
    kind: Any = getattr(diffusers, model_class)
    # diffusers itself ignores keys that its class does not have.
    facts = {key: value for key, value in part.config.items() if key in inspect.signature(kind).parameters}

    with torch.device("meta"):
        model: Any = kind(**copy.deepcopy(facts))
    like = denoisers()[model_class]
    config = {**model.config, **facts}
    completed = msgspec.structs.replace(
        part,
        model_class=model_class,
        config=config,
        parameters={"full": sum(value.numel() for value in model.parameters()), **part.parameters},
        tiny=tiny_denoiser(like.trained_part, dict(model.config)),
    )
    idle = like.idle
    if model_class == "SD3Transformer2DModel":  # Its last block does not use the queries of the text.
        idle = dict.fromkeys(SCALES, (r".*transformer_blocks\.{last}\.attn\.(add_q_proj|norm_added_q)\..*",))
    return msgspec.structs.replace(
        architecture,
        parts={part_name: completed},
        idle={
            scale: tuple(name.replace("{last}", str(completed.facts(scale).get("num_layers", 0) - 1)) for name in names)
            for scale, names in idle.items()
        },
    )


def _on_meta(part: Part) -> nn.Module:
    """Return the full-size model on torch's meta device, without memory."""
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        model: Any = language_model(part, copy.deepcopy(part.config))
    model.tie_weights()
    module: nn.Module = model
    return module


def _blocks(name: str, model: nn.Module, layers: int) -> tuple[str, list[nn.Module]]:
    """Return the path of the model's list of blocks, and the blocks."""
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == layers:
            return path, list(module)
    raise CheckFailed(f"{name} keeps its {layers} blocks in no list of modules, so nothing can recompute or shard them")


def _kinds(blocks: Sequence[nn.Module], facts: dict[str, Any]) -> list[int]:
    """Return a number for each block. Blocks that are built in the same way have the same number."""
    lists = [value for value in facts.values() if isinstance(value, list) and len(value) == len(blocks)]
    signatures = [(repr([value[index] for value in lists]), *_signature(block)) for index, block in enumerate(blocks)]
    numbers = {signature: number for number, signature in enumerate(dict.fromkeys(signatures))}
    return [numbers[signature] for signature in signatures]


_PLAIN: Final = (bool, int, float, str, type(None))
_PLACES: Final = ("layer_idx", "layer_id", "idx", "layer_index")
"""Attributes that number the blocks."""


def _signature(block: nn.Module) -> tuple[Any, ...]:
    return tuple(
        (
            path,
            type(module).__name__,
            tuple((name, tuple(value.shape)) for name, value in module.named_parameters(recurse=False)),
            tuple((key, value) for key, value in vars(module).items() if isinstance(value, _PLAIN) and key not in _PLACES),
        )
        for path, module in block.named_modules()
    )


def _fewest(kinds: Sequence[int]) -> int:
    """Return the smallest number of first blocks that contain a block of every kind, and at least two."""
    return max(min(2, len(kinds)), max(kinds.index(kind) for kind in kinds) + 1)
