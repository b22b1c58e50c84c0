"""Trains a model of transformers, by its configuration: `bfc predict hf:MODEL --task train` runs
it, and on a GPU `python -m bfc_tools.models.train FOLDER/config.json` does, on random tokens."""

from __future__ import annotations

import contextlib
from typing import Any

from bfc_tools.models.building import BOTH, configured, made, refuse, tell
from bfc_tools.models.options import OPTIMIZERS, PRECISIONS, train_options

#: Where nobody stops it.
STEPS = 1000


def main() -> None:
    """Makes the model, and steps."""
    arguments = train_options().parse_args()
    for name in ("batch", "seq", "accumulate"):
        if getattr(arguments, name) < 1:
            refuse(f"--{name} is 1 or more, not {getattr(arguments, name)}")
    config = configured(arguments)

    import torch

    weights, computes = PRECISIONS[arguments.precision]
    model, kind = made(config, arguments, getattr(torch, weights))
    if kind == BOTH and not hasattr(config, "decoder_start_token_id"):
        config.decoder_start_token_id = 0  # which a class alone leaves out
    model.train()
    tell(model, "training")
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None)
    if longest is not None and arguments.seq > longest:
        refuse(f"--seq {arguments.seq}: the model has positions for {longest} tokens")
    optimizer = getattr(torch.optim, OPTIMIZERS[arguments.optimizer])(model.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler("cuda", enabled=arguments.precision == "fp16")
    autocast: Any = contextlib.nullcontext
    if computes is not None:

        def autocast() -> Any:
            return torch.autocast("cuda", dtype=getattr(torch, computes))

    shape = (arguments.batch, arguments.seq)
    for _ in range(STEPS):
        for _ in range(arguments.accumulate):
            tokens = torch.randint(text.vocab_size, shape, device="cuda")
            mask = torch.ones_like(tokens)
            with autocast():
                loss = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
            scaler.scale(loss / arguments.accumulate).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
