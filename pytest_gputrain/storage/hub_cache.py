"""Finds a model in the local cache of the Hugging Face Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pytest_gputrain.utils.reading import read_whole


def snapshot(model: str, environ: Mapping[str, str]) -> Path | None:
    """Return the folder with a model's files in the cache; None if there is none.

    Nothing is fetched.

    Args:
        model: its name on the hub, as ``Qwen/Qwen3-8B``.
        environ: variables that say where the cache is.
    """
    folder = hub_cache(environ) / f"models--{model.replace('/', '--')}"
    snapshots = folder / "snapshots"
    try:
        return snapshots / read_whole(folder / "refs" / "main").decode().strip()
    except (OSError, UnicodeDecodeError):  # The model was fetched by the name of a revision.
        return max(snapshots.glob("*/"), key=lambda revision: revision.stat().st_mtime, default=None)


def cached_models(environ: Mapping[str, str]) -> list[str]:
    """Return the names of all models in the cache."""
    return sorted(folder.name.removeprefix("models--").replace("--", "/") for folder in hub_cache(environ).glob("models--*"))


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder in which huggingface_hub keeps models."""
    if cache := environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"
