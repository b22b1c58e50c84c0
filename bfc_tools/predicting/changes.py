"""The changes that can be tried, by name: what each does, and the line to write. Nothing here needs
PyTorch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Wanted:
    """A change as an option names it."""

    name: str
    what: str  # what it does, in a person's words
    line: str  # what to write in the program


WANTED = (
    Wanted(
        "checkpoint",
        "modules that repeat compute their activations again in the backward pass",
        "x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
    ),
    Wanted(
        "bf16",
        "autocast to bfloat16 around the forward pass and the loss",
        'with torch.autocast("cuda", torch.bfloat16):',
    ),
    Wanted(
        "half_batch",
        "half the batch of each DataLoader, and a step for every two of them",
        "DataLoader(..., batch_size=batch_size // 2)  # and every second optimizer.step()",
    ),
    Wanted(
        "offload",
        "what is saved for the backward pass lies on the host",
        "with torch.autograd.graph.save_on_cpu():",
    ),
    Wanted(
        "fused",
        "the optimizer's step in one kernel",
        "torch.optim.AdamW(..., fused=True)",
    ),
    Wanted(
        "for_loop",
        "the optimizer's step for one parameter after the other",
        "torch.optim.AdamW(..., foreach=False)",
    ),
    Wanted(
        "set_to_none",
        "gradients are given back instead of filled with zeros",
        "optimizer.zero_grad(set_to_none=True)",
    ),
    Wanted(
        "no_grad",
        "no graph is kept for a backward pass",
        "with torch.no_grad():",
    ),
)
BY_NAME = {one.name: one for one in WANTED}


def named(*texts: str) -> tuple[str, ...]:
    """The changes that texts such as "checkpoint,bf16" name.

    Raises ValueError for another name.

    >>> named("checkpoint,bf16", "bf16")
    ('checkpoint', 'bf16')
    """
    names = [name.strip().replace("-", "_") for text in texts for name in text.split(",") if text]
    for name in names:
        if name not in BY_NAME:
            raise ValueError(f"no change is called {name!r}; there are {', '.join(BY_NAME)}")
    return tuple(dict.fromkeys(names))
