"""xformers#281: the backward pass of the same two."""

from bfc_tools.museum.case import Case, Trial

TABLE = (
    ((1, 1024, 16), "16.5 MiB", "0.62890625 MiB"),
    ((1, 1024, 32), "17.0 MiB", "1.25390625 MiB"),
    ((1, 1023, 16), "16.470703125 MiB", "0.62890625 MiB"),
    ((1, 1023, 32), "16.970703125 MiB", "1.25390625 MiB"),
    ((1, 513, 16), "4.271484375 MiB", "0.31982421875 MiB"),
    ((1, 513, 32), "4.521484375 MiB", "0.63232421875 MiB"),
    ((1, 512, 16), "4.25 MiB", "0.314453125 MiB"),
    ((1, 512, 32), "4.5 MiB", "0.626953125 MiB"),
    ((1, 128, 16), "0.3125 MiB", ""),
    ((1, 127, 16), "0.310546875 MiB", "0.07861328125 MiB"),
    ((1, 127, 32), "", "0.15673828125 MiB"),
    ((8, 127, 16), "2.466796875 MiB", "0.6240234375 MiB"),
)


def reproduce(trial: Trial) -> None:
    for (batch, length, width), vanilla, optimized in TABLE:
        pool, other = trial.pytorch("16 GiB"), trial.pytorch("16 GiB", cure=True)
        row, matrix = batch * length * width * 4, batch * length * length * 4
        kept = [pool.empty(size) for size in [row] * 8 + [matrix] * 4]
        kept += [other.empty(size) for size in [row] * 10 + [batch * length * 4]]
        if vanilla:
            say = trial.used if (length, width) == (1024, 16) else trial.published
            say(f"at most, {batch} x {length} x {width}", vanilla, pool.peak_allocated)
        if optimized:
            what = f"the same without the matrices, {batch} x {length} x {width}"
            trial.published(what, optimized, other.peak_allocated, cure=True)
        kept.clear()


CASE = Case(
    title="The backward pass of attention needs four matrices, or none",
    source="facebookresearch/xformers#281",
    date="2022",
    library="PyTorch",
    kind="rounding",
    version="of 2022",
    observed="The backward pass of plain attention of 1,024 tokens of width 16 allocates 16.5 MiB "
    "at most, and the memory-efficient one 0.63 MiB.",
    why="Scores, softmax and the gradients of both are matrices of length by length, and live at "
    "once. The other one computes them again from a number for each row.",
    cure="memory-efficient attention, which keeps no matrix",
    upstream="Merged.",
    inferred=(
        (
            "Which tensors are live at the peak, from the figures for 1,024 tokens of width 16: "
            "eight rows and four matrices, or ten rows and a number for each token."
        ),
        "The year: the text that was read has no date.",
    ),
    reproduce=reproduce,
)
