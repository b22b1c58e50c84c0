"""From the name of a model to its configuration, which lies on this machine."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: What the name of a model begins with on the command line.
PREFIX = "hf:"
#: A class of transformers, whose defaults are a model.
A_CLASS = re.compile(r"[A-Z]\w*Config")
#: A model on Hugging Face, and perhaps a revision of it.
ON_THE_HUB = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*(?:@\w[\w./-]*)?")
FILE = "config.json"
#: Files of folders that have no configuration, and what to do then.
IN_ITS_PLACE = {
    "adapter_config.json": "it is an adapter: name the model that it was made for",
    "params.json": "it is in its maker's own format: name the folder that transformers reads",
    "model_index.json": "it is a pipeline of several models: name the folder of one of them",
}
#: Without it no model is made of a configuration.
NO_TRANSFORMERS = "a model by name is made by transformers, which is not installed here"
HOW = f"{NO_TRANSFORMERS}: pip install transformers"


def located(name: str) -> str:
    """The file with the configuration that a name such as "org/model" stands for, or the name of a
    class of transformers.

    Raises ValueError or FileNotFoundError with what is missing, and where to get it.
    """
    path = Path(name)
    if name and path.is_dir():
        return str(_in_folder(path))
    if path.is_file():
        read(path)
        return name
    if A_CLASS.fullmatch(name):
        return name
    if not ON_THE_HUB.fullmatch(name):
        raise FileNotFoundError(
            f"there is no folder {name!r}. {PREFIX} stands before a folder with a {FILE}, a model "
            "in Hugging Face's cache such as org/model, or a class such as LlamaConfig"
        )
    return str(_in_cache(name))


def read(path: Path | str) -> dict[str, Any]:
    """What a config.json says. Raises ValueError if that is no configuration."""
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except ValueError as error:  # also of its encoding
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no configuration: it is a {type(found).__name__} in JSON")
    if not isinstance(found.get("model_type"), str):
        raise ValueError(
            f"{path} does not say which model it is: a configuration of transformers has a "
            "model_type, such as llama"
        )
    return found


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that is about text, of a model of several."""
    for name in ("text_config", "llm_config", "language_config"):
        if isinstance(config.get(name), Mapping):
            return text_part(config[name])
    return config


def longest(place: str) -> int | None:
    """The most tokens that a model has positions for, if its configuration says so."""
    if A_CLASS.fullmatch(place):
        return None
    config = read(place)
    found = [one.get("max_position_embeddings") for one in (config, text_part(config))]
    return next((one for one in found if isinstance(one, int)), None)


def need_transformers() -> None:
    """Raises ImportError if it is not installed."""
    if importlib.util.find_spec("transformers") is None:
        raise ImportError(HOW)


def _in_folder(folder: Path) -> Path:
    file = folder / FILE
    if file.is_file():
        read(file)
        return file
    for name, what in IN_ITS_PLACE.items():
        if (folder / name).is_file():
            raise FileNotFoundError(f"{folder} has a {name} and no {FILE}: {what}")
    if any(folder.glob("*.gguf")):
        raise FileNotFoundError(
            f"{folder} has a model in GGUF, whose configuration is not read: name the folder, with "
            f"a {FILE}, of the model that it was made of"
        )
    raise FileNotFoundError(f"{folder} has no {FILE}, which says what model it is")


def cache() -> Path:
    """The folder in which Hugging Face keeps what was downloaded."""
    home = os.environ.get("HF_HOME")
    if home is None:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        home = f"{base}/huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(os.path.expanduser(os.path.expandvars(named or f"{home}/hub")))


def _in_cache(name: str) -> Path:
    model, _, revision = name.partition("@")
    kept = cache() / f"models--{model.replace('/', '--')}"
    ref = kept / "refs" / (revision or "main")
    commit = ref.read_text().strip() if ref.is_file() else revision
    found = kept / "snapshots" / commit / FILE
    if commit and found.is_file():
        read(found)
        return found
    with_revision = f" --revision {revision}" if revision else ""
    raise FileNotFoundError(
        f"no folder {name} is here, and {cache()} has no configuration of such a model. bfc "
        f"asks no network. Where there is one, this gets it, in a few kilobytes: hf download "
        f"{model} {FILE}{with_revision}"
    )
