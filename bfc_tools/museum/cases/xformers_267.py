"""xformers#267: attention in one piece, and without its matrix."""

from bfc_tools.museum.case import Case, Trial

TABLE = (
    ((1, 1024, 16), "8.1884765625 MiB", "0.2509765625 MiB"),
    ((1, 1024, 32), "8.3759765625 MiB", "0.5009765625 MiB"),
    ((1, 1023, 16), "8.173828125 MiB", "0.2509765625 MiB"),
    ((1, 1023, 32), "8.361328125 MiB", "0.5009765625 MiB"),
    ((1, 513, 16), "2.10498046875 MiB", "0.1279296875 MiB"),
    ((1, 513, 32), "2.19873046875 MiB", "0.2529296875 MiB"),
    ((1, 512, 16), "2.0947265625 MiB", "0.1259765625 MiB"),
    ((1, 512, 32), "2.1884765625 MiB", "0.2509765625 MiB"),
    ((1, 128, 16), "0.1494140625 MiB", "0.0322265625 MiB"),
    ((1, 128, 32), "0.1728515625 MiB", "0.0634765625 MiB"),
    ((8, 127, 16), "1.17236328125 MiB", "0.2490234375 MiB"),
    ((8, 127, 32), "1.3583984375 MiB", "0.4970703125 MiB"),
)


def reproduce(trial: Trial) -> None:
    for (batch, length, width), vanilla, optimized in TABLE:
        pool, other = trial.pytorch("16 GiB"), trial.pytorch("16 GiB", cure=True)
        sizes = [512] * 2 + [batch * length * width * 4] * 3
        kept = [pool.empty(size) for size in sizes + [batch * length * length * 4] * 2]
        kept += [other.empty(size) for size in sizes + sizes[-1:]]
        say = trial.used if (length, width) == (1024, 16) else trial.published
        say(f"at most, {batch} x {length} x {width}", vanilla, pool.peak_allocated)
        if optimized:
            what = f"the same without the matrix, {batch} x {length} x {width}"
            trial.published(what, optimized, other.peak_allocated, cure=True)
        kept.clear()


CASE = Case(
    title="Attention needs two matrices of length by length, and can do without",
    source="facebookresearch/xformers#267",
    date="2022",
    library="PyTorch",
    kind="rounding",
    version="of 2022",
    observed="Plain attention of 1,024 tokens of width 16 allocates 8.19 MiB at most, and the "
    "memory-efficient one 0.25 MiB. For other lengths the figures are odd multiples of 512 bytes.",
    why="Plain attention holds the scores and their softmax beside queries, keys and values. Each "
    "tensor is rounded up to 512 bytes, so that lengths such as 513 and 1,023 show.",
    cure="memory-efficient attention, which keeps no matrix",
    upstream="Merged.",
    inferred=(
        "1,024 bytes in two blocks were live before.",
        (
            "Which tensors are live at the peak: five, of which two are matrices, from the "
            "figures for 1,024 tokens of width 16."
        ),
        "The year: the text that was read has no date.",
    ),
    reproduce=reproduce,
)
