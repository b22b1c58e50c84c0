"""pytorch#139612: attention in half precision, with the old and the safe softmax."""

from bfc_tools.museum.case import Case, Trial

#: What the GPU has in use outside of the allocator: the figure for 2.1, less what is reserved.
OUTSIDE = 152.94 * 2**20


def reproduce(trial: Trial) -> None:
    scores, row = 32 * 4096 * 4096 * 2, 32 * 4096 * 128 * 2
    for is_safe in (True, False):
        pool = trial.pytorch("24 GiB", cure=not is_safe)
        kept, scaled = [pool.empty(row) for _ in range(3)], [pool.empty(row), pool.empty(row)]
        kept.append(pool.empty(scores))
        scaled.clear()
        kept.append(pool.empty(scores))
        if is_safe:
            masks = [pool.empty(scores // 2), pool.empty(32 * 4096)]
            kept[-1] = pool.empty(scores)
            masks.clear()
        kept.append(pool.empty(row))
        used = pool.peak_reserved + OUTSIDE
        if is_safe:
            trial.published("used, PyTorch 2.6", "3898.94 MiB", used)
        else:
            trial.used("used, PyTorch 2.1", "2360.94 MiB", used)
            trial.cured("reserved, plain softmax", "2208 MiB", pool.peak_reserved)


CASE = Case(
    title="A softmax that is safe for masked rows takes 1.5 GiB more in attention",
    source="pytorch/pytorch#139612",
    date="2024-11-04",
    library="PyTorch",
    kind="growth",
    version="2.6.0a0",
    observed="Attention of 32 heads over 4,096 tokens in half precision uses 2,360.94 MB with "
    "PyTorch 2.1, and 3,898.94 MB with 2.6.",
    why="The safe softmax compares the scores, which gives a mask of one byte for each, and writes "
    "its result once more with the masked rows replaced. A third matrix and a mask are live beside"
    " scores and softmax.",
    cure="the plain softmax of 2.1",
    upstream="pytorch#139613 lowers the peak; it was closed.",
    inferred=(
        "152.94 MiB are outside of the allocator, from the figure for 2.1.",
        "The order of the temporary tensors, from what a safe softmax has to compute.",
        "What the thread calls MB are MiB, as in its script.",
    ),
    reproduce=reproduce,
)
