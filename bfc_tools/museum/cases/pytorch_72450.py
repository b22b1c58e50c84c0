"""pytorch#72450: a softmax of 3 GB, its mean, and the backward pass."""

import bfc
from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    import torch

    with bfc.predict(device="a100"):
        options = {"dtype": torch.bfloat16, "device": "cuda:0", "requires_grad": True}
        x = torch.rand([5120, 2, 384, 384], **options)
        trial.published("after allocation", "3019898880", torch.cuda.memory_allocated())
        x = torch.nn.functional.softmax(x, dim=-1)
        loss = torch.mean(x)
        trial.published("after forward", "6039798272", torch.cuda.memory_allocated())
        loss.backward()
        trial.published("after backward", "9059697152", torch.cuda.memory_allocated())
        trial.published("at most", "15099495424", torch.cuda.max_memory_allocated())


CASE = Case(
    title="A softmax and its backward pass need five times the memory of their input",
    source="pytorch/pytorch#72450",
    date="2022-03-08",
    library="PyTorch",
    kind="prediction",
    version="nightly of March 2022",
    observed="For an input of 3,019,898,880 bytes, 15,099,495,424 bytes are allocated at most. The "
    "same holds for single precision.",
    why="Input, result, the gradient of the mean, and two gradients of the softmax are live at "
    "once. The mean's gradient has the size of the input, since it is spread out before it is "
    "multiplied.",
    cure="",
    upstream="Open when it was read; the softmax itself needs its input no longer.",
    inferred=(),
    reproduce=reproduce,
    needs_torch=True,
)
