"""sfllm#44: the logits of 64 captured graphs, one for each size of a batch."""

from bfc_tools.museum.case import Case, Trial

EACH = 4 * 151_936 * 2  # four rows for each sequence, in half precision
STREAM = 1


def reproduce(trial: Trial) -> None:
    pool = trial.pytorch("24 GiB")
    kept = []
    for sequences in range(64, 0, -1):
        with pool.graph(STREAM):
            kept.append(pool.empty(sequences * EACH, STREAM))
    asked = pool.stat("requested_bytes.all.current")
    trial.published("logits of all graphs", "2.35 GiB", asked)
    cure = trial.pytorch("24 GiB", cure=True)
    kept.append(cure.empty(64 * EACH))  # and each graph writes into a part of it
    trial.used("one buffer", "74.19 MiB", cure.allocated)
    trial.cured("reserved for one buffer", "76 MiB", cure.reserved)
    kept.clear()
    pool.drop_graphs()


CASE = Case(
    title="The logits that 64 CUDA graphs return take 32 times those of the largest batch",
    source="wejoncy/sfllm#44",
    date="2026-09-13",
    library="PyTorch",
    kind="private pools",
    version="as of September 2026",
    observed="A graph is captured for each batch of 1 to 64 sequences of a small Qwen3 with "
    "speculation. Their logits take 2.35 GiB, and 74.19 MiB when one buffer serves all.",
    why="A pool that graphs share reuses only what was freed during a capture. What a graph "
    "returns stays referenced, so that the next capture gets new memory, and the sizes add up.",
    cure="one buffer of the largest size, made before the captures",
    upstream="Merged.",
    inferred=(
        "A vocabulary of 151,936 tokens, which is Qwen3's, in half precision.",
        "Four rows for each sequence, from the 74.19 MiB; one graph for each size.",
        "All graphs share one pool, as they do in the project.",
    ),
    reproduce=reproduce,
)
