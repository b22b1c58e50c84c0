"""Trains a model of transformers, by its configuration: `bfc predict hf:MODEL --task train` runs
it, and on a GPU `python -m bfc_tools.models.train FOLDER/config.json` does, on random tokens."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from bfc_tools.models.building import add_model, configured, made, refuse, tell

#: By name: the weights, and what autocast computes in; None is no autocast.
PRECISIONS = {"bf16": ("float32", "bfloat16"), "bf16-true": ("bfloat16", None)}
PRECISIONS |= {"fp32": ("float32", None), "fp16": ("float32", "float16")}
OPTIMIZERS = {"adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "adafactor": "Adafactor"}
#: Where nobody stops it.
STEPS = 1000


def options() -> argparse.ArgumentParser:
    """What it reads its arguments with."""
    parser = argparse.ArgumentParser("bfc predict hf:MODEL --task train", allow_abbrev=False)
    add_model(parser)
    add = parser.add_argument
    add("--batch", type=int, default=8, help="sequences in a batch (default: 8)")
    add("--seq", type=int, default=2048, help="tokens in a sequence (default: 2048)")
    add("--accumulate", type=int, default=1, metavar="N", help="batches in a step (default: 1)")
    add(
        "--precision",
        choices=list(PRECISIONS),
        default="bf16",
        help="bf16 and fp16: weights in 32 bits, and autocast (default: bf16); bf16-true: weights, "
        "gradients and states in 16 bits, too; fp32",
    )
    add("--optimizer", choices=list(OPTIMIZERS), default="adamw", help="(default: adamw)")
    return parser


def main() -> None:
    """Makes the model, and steps."""
    arguments = options().parse_args()
    for name in ("batch", "seq", "accumulate"):
        if getattr(arguments, name) < 1:
            refuse(f"--{name} is 1 or more, not {getattr(arguments, name)}")
    config = configured(arguments)

    import torch

    weights, computes = PRECISIONS[arguments.precision]
    model, kind = made(config, arguments, getattr(torch, weights))
    if kind == "AutoModelForSeq2SeqLM" and not hasattr(config, "decoder_start_token_id"):
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
