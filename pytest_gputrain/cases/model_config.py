"""Reads a model's config.json, of transformers or diffusers, and makes it a model that cases can name."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Final

import msgspec

from pytest_gputrain.cases.architectures.facts import (
    LANGUAGE_KEYS,
    Architecture,
    architectures,
    configured,
    denoisers,
    language_config,
)
from pytest_gputrain.records import Case
from pytest_gputrain.utils.errors import BadCase
from pytest_gputrain.utils.reading import read_whole
from pytest_gputrain.utils.sanitize import OneLineError
from pytest_gputrain.utils.suggest import did_you_mean
from pytest_gputrain.utils.units import format_bytes

Config = dict[str, Any]
"""The keys of a config.json."""

_UNUSED: Final = (
    *("_name_or_path", "_commit_hash", "transformers_version", "_diffusers_version", "architectures", "auto_map"),
    *("dtype", "torch_dtype", "use_cache", "quantization_config", "attn_implementation", "_attn_implementation"),
    *(
        "_attn_implementation_autoset",
        "task_specific_params",
        "finetuning_task",
        "output_attentions",
        "output_hidden_states",
    ),
    *("return_dict", "torchscript", "unsloth_fixed", "unsloth_version", "decoder"),
)
"""Keys that say where a model is from, or what the case decides: they change nothing that trains."""

_OTHER_INPUTS: Final = ("vision_config", "audio_config")
"""Keys of what reads images or sounds beside a language model."""

_MOST_BYTES: Final = 16 * 2**20
"""The largest file that is read: a folder has weights beside the config, and a slip of the hand names them."""

_DENOISERS: Final = ("transformer", "unet")
"""Folders of a pipeline of diffusers that hold what trains."""

_POSITIONS: Final = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length")
"""The keys of configs for the longest sequence."""


def with_model(case: Case, folder: Path) -> Case:
    """Return the case. If its model is the path of a config, the model becomes ``NAME#DIGEST`` and is registered in this
    process.

    Args:
        folder: the folder of the test file, to which the path is relative.

    Raises:
        BadCase: there is no such config, or it is none of a model that can train here; one sentence.
    """
    model: object = case.model  # The case is not validated yet, so its model may have any type.
    if case.code or not isinstance(model, str) or model in architectures() or not is_path(model):
        return case
    try:
        name, config = read(folder / model, whole=case.part == "all")
    except ConfigError as error:
        raise BadCase(f"the case {case} names the model {model}, but {error}", reason=str(error)) from None
    digest = hashlib.sha256(msgspec.json.encode(config, order="deterministic")).hexdigest()[:8]
    declare(f"{name}#{digest}", config)
    return case.replace(model=f"{name}#{digest}")


def is_path(model: str) -> bool:
    """Tell whether ``model`` is the path of a config and not a name of the zoo."""
    return "/" in model or model.endswith(".json") or model in (".", "..")


def declare(name: str, config: Config) -> Architecture:
    """Register ``name`` as a model of this process that cases can name, and return its facts."""
    return architectures().setdefault(name, configured(name.partition("#")[0], config, source="a config.json"))


def config_of(case: Case) -> Config:
    """Return the config with which the case's model was registered; empty for other models."""
    return architectures()[case.model].trained_part.config if "#" in case.model and case.model in architectures() else {}


def key_of_positions(config: Config) -> str | None:
    """Return the key for the number of positions that a language model was made for; None if its config has none."""
    return next((key for key in _POSITIONS if isinstance(config.get(key), int)), None)


class ConfigError(OneLineError):
    """An error in a config. The message is the rest of a sentence."""


def read(path: Path, *, whole: bool = False) -> tuple[str, Config]:
    """Return a readable name, and the normalised config of a file or of a folder that has one.

    Args:
        whole: whether all of a vision-language model is wanted, and not its language model alone.

    Raises:
        ConfigError: it is no config of a model that can train here.
    """
    file, content = _found(path)
    folder = file.parent.parent if file.parent.name in _DENOISERS else file.parent
    if folder.parent.name == "snapshots":
        # This is a path in the hub's cache: models--ORGANISATION--NAME/snapshots/REVISION.
        folder = Path(folder.parent.parent.name.rpartition("--")[2])
    name = folder.resolve().name if file.stem == "config" else file.stem
    config = _without_unused(content)
    if not whole:
        config = _language_alone(config)
    elif not isinstance(config.get("vision_config"), dict):
        raise ConfigError(f"{file} has no vision_config, which part='all' trains; leave part out")
    return re.sub(r"[^\w.-]+", "-", name) or "model", config


def _without_unused(config: Config) -> Config:
    """Return the config without keys that change nothing in training. ``architectures`` stays, because ``model_type`` may be
    unknown."""
    unused = set(_UNUSED) - ({"architectures"} if config.get("auto_map") else set())
    return {
        key: _without_unused(value) if isinstance(value, dict) and key.endswith("_config") else value
        for key, value in config.items()
        if key not in unused
    }


def _language_alone(config: Config) -> Config:
    """Return the config without the networks for images and sounds, which do not change the language model."""
    if language_config(config) is config:
        return {key: value for key, value in config.items() if key not in _OTHER_INPUTS}
    return {
        key: _language_alone(value) if key in LANGUAGE_KEYS and isinstance(value, dict) else value
        for key, value in config.items()
        if key in LANGUAGE_KEYS or not key.endswith("_config")
    }


def language_only(path: Path) -> bool:
    """Tell whether only the language model trains, in a config that also has networks for images or sounds.

    Raises:
        ConfigError: as of `read`.
    """
    content = _found(path)[1]
    return any(content.get(key) is not None for key in _OTHER_INPUTS) or language_config(content) is not content


def quantised_by(path: Path) -> str:
    """Return how the published weights of a config are packed, such as ``gptq``; empty if they are not.

    Raises:
        ConfigError: as of `read`.
    """
    content = _found(path)[1]
    packed = content.get("quantization_config") or language_config(content).get("quantization_config")
    if not packed:
        return ""
    return str(packed.get("quant_method") or "unknown") if isinstance(packed, dict) else "unknown"


def _found(path: Path) -> tuple[Path, Config]:
    file = _file(path)
    content = _json(file)
    if file.name == "model_index.json":
        part = next((part for part in _DENOISERS if part in content), None)
        if part is None:
            raise ConfigError(f"{file} lists no {' or '.join(_DENOISERS)}; give the config.json of the network that trains")
        file = file.parent / part / "config.json"
        content = _json(file)
    if complaint := _complaint(content):
        raise ConfigError(f"{file} {complaint}")
    return file, content


def _file(path: Path) -> Path:
    if not path.is_dir():
        return path
    places = ["config.json", "model_index.json", *(f"{part}/config.json" for part in _DENOISERS)]
    found = next((path / place for place in places if (path / place).is_file()), None)
    if found is None:
        raise ConfigError(
            f"the folder {path} has no config.json; give a folder that transformers or diffusers saved a model to"
        )
    return found


def _json(file: Path) -> Config:
    what = "give the config.json of a model"
    try:
        size = file.stat().st_size
        if size > _MOST_BYTES:
            raise ConfigError(f"{file} has {format_bytes(size)}, which is more than any config has; {what}")
        content: Any = json.loads(read_whole(file), parse_constant=lambda name: {"__float__": name})
        # This raises for an integer beyond 64 bits, which the JSON of a task cannot hold.
        msgspec.json.encode(content)
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}); give a path that is relative to the test file"
        ) from None
    except (ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON that can be read ({error}); {what}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is not a JSON object; {what}")
    return content


def _complaint(config: Config) -> str | None:
    """Say why the model of a config cannot train here, as the rest of a sentence."""
    class_name = config.get("_class_name")
    if isinstance(class_name, str):
        if class_name in denoisers():
            return None
        hint = did_you_mean(class_name, denoisers()) or f"; known are {', '.join(sorted(denoisers()))}"
        return f"has _class_name={class_name!r}, a class whose inputs are not known{hint}"
    if not isinstance(config.get("model_type"), str):
        return (
            "has neither model_type, by which transformers finds a class, nor _class_name, by which diffusers does; give "
            "the config.json of a model"
        )
    if config.get("is_encoder_decoder") or language_config(config).get("is_encoder_decoder"):
        return "has is_encoder_decoder=true; only decoder-only language models train from a config"
    return None
