"""pytorch#31655: all windows of an image, times a template."""

import bfc
from bfc_tools.museum.case import Case, Trial

IMAGE, WINDOW = 1000, 100


def reproduce(trial: Trial) -> None:
    import torch
    from torch.nn.functional import conv2d

    for is_cured in (False, True):
        with bfc.predict(device="h200") as program:
            x = torch.rand(1, 3, IMAGE, IMAGE, device="cuda")
            t = torch.rand(1, 3, WINDOW, WINDOW, device="cuda")
            if is_cured:
                conv2d(x, t.transpose(0, 1), groups=3)
            else:
                y = x.unfold(2, WINDOW, 1).unfold(3, WINDOW, 1)
                torch.einsum("xcijkl,xckl->xcij", y, t)
        if is_cured:
            trial.cured("at most, conv2d", "21 MiB", program.peak_allocated)
        else:
            largest = int(program.trace.size.max())
            trial.published("tried to allocate", "90.73 GiB", largest)


CASE = Case(
    title="A product of the windows of an image of 11 MiB asks for 91 GiB",
    source="pytorch/pytorch#31655",
    date="2019-12-27",
    library="PyTorch",
    kind="prediction",
    version="1.2.0",
    observed="All windows of 100 by 100 of an image of 1,000 by 1,000 in three colours, times a "
    "template by einsum, ask for 90.73 GiB, although the result has 901 by 901 values.",
    why="The windows are a view that takes nothing, but a product of batches needs its operands "
    "dense. Each value of the image is copied into up to 10,000 windows.",
    cure="a convolution with the template",
    upstream="Open when it was read.",
    inferred=("Single precision, and a GPU with room for it.",),
    reproduce=reproduce,
    needs_torch=True,
)
