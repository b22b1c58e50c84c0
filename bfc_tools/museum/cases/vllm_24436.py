"""vllm#24436: the indices of sorted logits, for the 256 requests that warm the sampler up."""

from bfc_tools.museum.case import Case, Trial

VOCABULARY = 151_936


def reproduce(trial: Trial) -> None:
    for requests in 256, 64:
        pool = trial.pytorch("23.53 GiB", cure=requests == 64)
        kept = [pool.empty("20.32 GiB"), pool.empty(23.43 * 2**30 - pool.reserved)]
        answer = pool.refuses(requests * VOCABULARY * 8)
        if requests == 256:
            refused = [nbytes for _, nbytes, address in pool.device.calls if address is None]
            trial.published("the indices of 256 requests", "refused", answer)
            trial.published("asked of the driver", "298.00 MiB", refused[0])
        else:
            trial.cured("the indices of 64 requests", "fits", answer)
        del kept


CASE = Case(
    title="The sampler's warm-up asks for 298 MiB where 296.75 are needed and 98 are free",
    source="vllm-project/vllm#24436",
    date="2025-09-08",
    library="PyTorch",
    kind="limits",
    version="as of September 2025",
    observed="Sorting the logits of 256 made-up requests fails: 298.00 MiB are asked for, and "
    "98.25 of 23.65 GiB are free.",
    why="The indices of a sort are eight bytes each, twice the logits, and a request above 10 MiB "
    "is rounded up to whole 2 MiB before the driver is asked. The sampler is warmed up after the "
    "cache has taken what was free.",
    cure="--max-num-seqs 64",
    upstream="Open when it was read.",
    inferred=(
        "A vocabulary of 151,936 tokens, which is Qwen3's.",
        "What is not free is one block of the model's size and one of the rest.",
    ),
    reproduce=reproduce,
)
