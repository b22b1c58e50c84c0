"""Soup#327: the loss of a language model, stage by stage, in bytes a logit."""

import bfc
from bfc_tools.museum.case import Case, Trial

TOKENS, VOCABULARY = 512, 151_936
STAGES = {
    False: (
        ("the logits", "2.0000"),
        ("at most in the loss", "10.0000"),
        ("after the loss", "6.0000"),
        ("at most in the backward pass", "14.0000"),
    ),
    True: (("at most, output let go", "12.0000"),),
}


def reproduce(trial: Trial) -> None:
    import torch
    from torch.nn.functional import cross_entropy, linear

    for is_cured in (False, True):
        with bfc.predict(device="h100"):
            options = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
            hidden, head = (torch.randn(rows, 8, **options) for rows in (TOKENS, VOCABULARY))
            labels = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda")
            outputs, before = [hidden[:1] @ head[:1].T], torch.cuda.memory_allocated()
            outputs[0] = linear(hidden, head)
            at = [torch.cuda.memory_allocated()]
            loss = cross_entropy(outputs[0].float(), labels)
            at += [torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()]
            del outputs[0 if is_cured else 1 :]
            loss.backward()
            at.append(torch.cuda.max_memory_allocated())
        for (what, text), nbytes in zip(reversed(STAGES[is_cured]), reversed(at), strict=False):
            each = round((nbytes - before) / (TOKENS * VOCABULARY), 4)
            trial.published(f"{what}, bytes a logit", text, each, cure=is_cured)


CASE = Case(
    title="A model's output that is still in a variable costs two bytes a logit more",
    source="MakazhanAlpamys/Soup#327",
    date="2026-08-07",
    library="PyTorch",
    kind="leaks",
    version="2.13.0, CUDA 13.0",
    observed="On an H100 a logit has 2 bytes, the loss takes 10 at most and leaves 6, and its "
    "backward pass takes 14. When the output is let go before, it takes 12.",
    why="Logits in half precision become single for the loss, whose log-softmax stays for the "
    "backward pass, and that makes two gradients of the same size. The output itself is not needed "
    "then, but a variable holds it.",
    cure="del output before backward()",
    upstream="Open when it was read; the estimate keeps 14.",
    inferred=("512 tokens and a vocabulary of 151,936, which are among those of the thread.",),
    reproduce=reproduce,
    needs_torch=True,
)
