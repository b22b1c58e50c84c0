"""Serves a model of transformers, by its configuration: `bfc predict hf:MODEL --task serve` runs
it. On a GPU `python -m bfc_tools.models.serve FOLDER/config.json` does, on random tokens.

The cache has room for all sequences from the beginning, so that all passes of a prefill over so
many tokens need the same, and all steps that make a token do: the first and the last pass are run,
and a few steps.
"""

from __future__ import annotations

import inspect
from typing import Any

from bfc_tools.models.building import DECODER, configured, made, refuse, tell
from bfc_tools.models.options import serve_options

#: Steps that are run of those that make a token each.
STEPS = 2


def main() -> None:
    """Makes the model, fills its cache, and makes a few tokens."""
    arguments = serve_options().parse_args()
    for name, least in (("context", 2), ("concurrency", 1), ("prefill", 0)):
        if getattr(arguments, name) < least:
            refuse(f"--{name} is {least} or more, not {getattr(arguments, name)}")
    config = configured(arguments)

    import torch
    from transformers import StaticCache

    model, kind = made(config, arguments, getattr(torch, arguments.dtype))
    if kind != DECODER:
        refuse(f"a {type(model).__name__} has no cache of tokens: --task serve is for decoders")
    model.eval()
    tell(model, "serving")
    context, width = arguments.context, arguments.concurrency
    cache = StaticCache(config, max_cache_len=context)
    part = context - 1  # the last token is made
    if arguments.prefill:
        part = max(1, min(part, arguments.prefill // width))
    vocabulary = config.get_text_config().vocab_size
    with torch.inference_mode():
        for begin in sorted({0, context - 1 - part}):
            _forward(torch, model, cache, torch.randint(vocabulary, (width, part)), begin)
        for _ in range(STEPS):
            _forward(torch, model, cache, torch.randint(vocabulary, (width, 1)), context - 1)


def _forward(torch: Any, model: Any, cache: Any, tokens: Any, begin: int) -> None:
    """A pass over tokens, which stand from `begin` on in their sequences, and the next ones."""
    tokens = tokens.cuda()
    positions = torch.arange(begin, begin + tokens.shape[1], device="cuda")[None]
    takes = inspect.signature(model.forward).parameters
    named = {"cache" if "cache" in takes else "past_key_values": cache}  # the name since 5.24
    found = model(input_ids=tokens, position_ids=positions, logits_to_keep=1, **named)
    found.logits[:, -1].float().argmax(-1)


if __name__ == "__main__":
    main()
