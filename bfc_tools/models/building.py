"""A model, made by transformers on the predicted GPU, from its configuration."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from typing import Any, NoReturn

from bfc_tools.models import quantized
from bfc_tools.models.names import A_CLASS, HOW

#: Which classes may make a model of a configuration, and what they make.
DECODER, BOTH, ENCODER = "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM"
KINDS = {DECODER: "a decoder", BOTH: "an encoder and a decoder", ENCODER: "an encoder"}


def refuse(words: str) -> NoReturn:
    """Ends the program, with words."""
    raise SystemExit(words)


def configured(arguments: argparse.Namespace) -> Any:
    """The configuration. Ends the program where transformers makes none."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        refuse(HOW)
    changes = dict(map(_changed, arguments.set))
    if A_CLASS.fullmatch(arguments.config):
        made = getattr(transformers, arguments.config, None)
        if made is None:
            refuse(f"transformers {transformers.__version__} has no class {arguments.config}")
        config = made()
    else:
        config = _of_file(transformers, arguments)
    for name, value in changes.items():
        inner = next((one for one in (config, *_parts(config)) if hasattr(one, name)), None)
        if inner is None:
            refuse(f"--set {name}: the configuration, a {type(config).__name__}, has no {name}")
        setattr(inner, name, value)
    return config


def _changed(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        refuse(f"--set {text}: write NAME=VALUE, such as num_hidden_layers=4")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _parts(config: Any) -> list[Any]:
    """The configuration of the part that reads and writes text, of a model of several."""
    text = config.get_text_config()
    return [] if text is config else [text]


def _of_file(transformers: Any, arguments: argparse.Namespace) -> Any:
    path, trusted = arguments.config, arguments.trust_remote_code
    folder = os.path.dirname(os.path.abspath(path))
    with open(path, encoding="utf-8") as file:
        said = json.load(file)
    known = said["model_type"] in transformers.CONFIG_MAPPING
    if not known and "auto_map" in said and not trusted:
        refuse(
            f"transformers {transformers.__version__} does not know the model {said['model_type']},"
            " whose code lies beside its configuration: --trust-remote-code runs that"
        )
    if not known and "auto_map" not in said:
        refuse(
            f"transformers {transformers.__version__} does not know the model {said['model_type']}:"
            " a newer one may"
        )
    try:
        return transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trusted and not known
        )
    except Exception as error:
        refuse(f"transformers makes no configuration of {path}: {in_a_line(error)}")


def in_a_line(error: BaseException) -> str:
    """An error's text, without its lines."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _kinds(config: Any) -> list[str]:
    """The kinds that a configuration may make, the likely one first: many encoders can be made as
    decoders, too."""
    if getattr(config, "is_encoder_decoder", False):
        return [BOTH, DECODER, ENCODER]
    named = " ".join(getattr(config, "architectures", None) or ())
    decodes = getattr(config, "is_decoder", False) or re.search("ForCausalLM|LMHeadModel", named)
    return [DECODER, BOTH, ENCODER] if decodes else [ENCODER, DECODER, BOTH]


def weights_of(arguments: argparse.Namespace) -> int:
    """The bytes of a model's weights in 16 bits, or quantized as its configuration says. Nothing is
    allocated."""
    import torch

    config = configured(arguments)
    model, _ = made(config, arguments, torch.bfloat16, "meta")
    said = quantization_of(config)
    if said is None:
        return sum(one.numel() * one.element_size() for one in model.parameters())
    try:
        return quantized.bytes_of(model, said)
    except ValueError as error:
        refuse(str(error))


def quantization_of(config: Any) -> dict[str, Any] | None:
    """How the weights of a configuration are quantized, if they are."""
    for one in (config, *_parts(config)):
        said = getattr(one, "quantization_config", None)
        if said is not None:
            return dict(said if isinstance(said, dict) else said.to_dict())
    return None


def made(
    config: Any, arguments: argparse.Namespace, dtype: Any, device: str = "cuda"
) -> tuple[Any, str]:
    """The model on a device, with random weights, and what kind of model it is: a key of `KINDS`.

    Ends the program where transformers makes none of the configuration.
    """
    import torch
    import transformers

    with torch.device(device):
        for kind in _kinds(config):
            maker = getattr(transformers, kind)
            tried = [one for one in (config, *_parts(config)) if type(one) in maker._model_mapping]
            remote = arguments.trust_remote_code and kind in (getattr(config, "auto_map", {}) or {})
            if not tried and not remote:
                continue
            try:
                model = maker.from_config(
                    tried[0] if tried else config,
                    dtype=dtype,
                    attn_implementation=arguments.attention,
                    **({"trust_remote_code": True} if remote else {}),
                )
            except Exception as error:
                refuse(f"transformers makes no model of the configuration: {in_a_line(error)}")
            return model, kind
    refuse(
        f"of a {type(config).__name__} transformers makes no model that reads and writes text: "
        f"bfc knows {', '.join(KINDS.values())}. A program of yours that makes it can be predicted"
    )


def tell(model: Any, doing: str) -> None:
    """A line about the model on standard error."""
    count = sum(one.numel() for one in model.parameters())
    print(f"{doing} {type(model).__name__}: {count:,} parameters", file=sys.stderr)
    if quantization_of(model.config) is not None:
        print("its weights are not quantized here, as its configuration says", file=sys.stderr)
