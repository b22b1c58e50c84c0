"""ao#4068: a large tensor in eight bits."""

import bfc
from bfc_tools.museum.case import Case, Trial

SIZE = 4096


def reproduce(trial: Trial) -> None:
    import torch

    for is_cured in (False, True):
        with bfc.predict(device="h100"):
            x = torch.zeros(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
            scale = torch.ones(1, device="cuda")
            before = torch.cuda.memory_allocated()
            wide = x.to(torch.float32, copy=True)
            scaled = wide.div_(scale) if is_cured else wide / scale
            clamped = scaled.clamp_(-448, 448) if is_cured else scaled.clamp(-448, 448)
            made = clamped.to(torch.float8_e4m3fn)
            peak = torch.cuda.max_memory_allocated() - before
            copies = (peak - made.numel()) / (4 * made.numel())
        text = "1" if is_cured else "3"
        trial.published("copies in single precision", text, copies, cure=is_cured)


CASE = Case(
    title="To store a tensor in eight bits takes three copies of it in single precision",
    source="pytorch/ao#4068",
    date="2026-03-12",
    library="PyTorch",
    kind="prediction",
    version="as of March 2026",
    observed="Quantising large activations ran out of memory: up to three copies in single "
    "precision live at once.",
    why="The tensor is widened, divided by its scale and clamped, and each of these makes a "
    "tensor that a variable holds until the end.",
    cure="div_ and clamp_ on the first copy",
    upstream="Open when it was read, with this cure.",
    inferred=("The size and the type of the tensor: any that is narrower than single precision.",),
    reproduce=reproduce,
    needs_torch=True,
)
