"""Finds the configuration of a model: a file, a folder, or a model in the local cache of the Hugging Face Hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_CONFIGS = ("config.json", "transformer/config.json", "unet/config.json")
"""In a folder of transformers, or of a pipeline of diffusers, whose networks have folders of their own."""


class NoConfig(Exception):
    """There is no configuration; one sentence."""


def config_of(model: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The file of a model's configuration. Nothing is fetched.

    Args:
        model: a file, a folder, or a name on the hub, as ``Qwen/Qwen3-8B``.

    Raises:
        NoConfig: there is none.
    """
    path = Path(model).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        return _in_folder(path, model)
    snapshots = hub_cache(environ) / f"models--{model.replace('/', '--')}"
    if not snapshots.is_dir():
        raise NoConfig(f"there is no file or folder {model}, and no such model in the cache of the hub ({snapshots.parent})")
    try:
        revision = (snapshots / "refs" / "main").read_text().strip()
    except OSError:
        found = sorted((snapshots / "snapshots").glob("*/"), key=lambda folder: folder.stat().st_mtime)
        if not found:
            raise NoConfig(f"the cache of the hub has no files of {model} ({snapshots})") from None
        revision = found[-1].name
    return _in_folder(snapshots / "snapshots" / revision, model)


def _in_folder(folder: Path, model: str) -> Path:
    for name in _CONFIGS:
        if (folder / name).is_file():
            return folder / name
    raise NoConfig(f"{model} has none of {', '.join(_CONFIGS)} ({folder})")


def hub_cache(environ: Mapping[str, str]) -> Path:
    """The folder that huggingface_hub keeps models in."""
    if cache := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"
