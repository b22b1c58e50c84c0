"""tokenspeed#1350: the hidden states that the graphs of a prefill return."""

from bfc_tools.museum.case import Case, Trial

ROW, STREAM, TENSORS = 7168 * 2, 1, 6  # the hidden state, and five more of the same size


def sizes() -> list[int]:
    rows = [16]
    while rows[-1] < 8192:  # the next is at most an eighth larger
        rows.append(rows[-1] + min(max(1 << (rows[-1] // 8).bit_length() - 1, 16), 512))
    return rows[::-1]


def reproduce(trial: Trial) -> None:
    trial.published("graphs", "56", len(sizes()))
    trial.published("rows of all graphs", "101376", sum(sizes()))
    for is_cured, text in (False, "8.12 GiB"), (True, "672 MiB"):
        pool = trial.pytorch("80 GiB", cure=is_cured)
        kept = [pool.empty(8192 * ROW) for _ in range(TENSORS * is_cured)]
        for rows in sizes():
            with pool.graph(STREAM):
                made = [pool.empty(rows * ROW, STREAM) for _ in range(TENSORS)]
            kept += made * (not is_cured)
            made.clear()
        add = trial.cured if is_cured else trial.published
        add("kept for good", text, pool.stat("requested_bytes.all.current"))
        kept.clear()
        pool.drop_graphs()


CASE = Case(
    title="What 56 CUDA graphs of a prefill return is kept for each of them, 8.12 GiB in all",
    source="lightseekorg/tokenspeed#1350",
    date="2026-09-01",
    library="PyTorch",
    kind="private pools",
    version="as of September 2026",
    observed="Graphs for prefills of up to 8,192 tokens of Kimi K3 pin 8.12 GiB as long as the "
    "server runs: 56 graphs, whose outputs have 101,376 rows.",
    why="Each graph returns a hidden state and five more, and somebody keeps them. So the pool "
    "that the graphs share cannot hand their memory to the next capture, and the sizes add up.",
    cure="one buffer for each output, into which every graph copies",
    upstream="Open when it was read.",
    inferred=(
        "The sizes, from the rule in the project's source: 16, then up to an eighth more each.",
        "Half precision, in a model with 7,168 numbers to a hidden state.",
        "What a graph allocates and does not return is left out.",
    ),
    reproduce=reproduce,
)
