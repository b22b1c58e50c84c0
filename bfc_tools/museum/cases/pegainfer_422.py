"""pegainfer#422: how many blocks of keys and values fit beside a model."""

from bfc_tools.museum.case import Case, Trial

BLOCK = 16 * 36 * 2 * 8 * 128 * 2  # 16 tokens, 36 layers, keys and values of 8 heads of 128
MIB = 2**20


def reproduce(trial: Trial) -> None:
    total, weights, peak, margin = 24_112 * MIB, 9_094 * MIB, 337 * MIB, 150 * MIB
    budget = total * 9 // 10
    flat, profiled = (total - weights) * 85 // 100, budget - weights - peak - margin
    for room, blocks, tokens in (flat, "5673", "90752"), (profiled, "5385", "86144"):
        is_cured = room == profiled
        trial.published("blocks", blocks, room // BLOCK, cure=is_cured)
        trial.published("tokens", tokens, (room // BLOCK - 1) * 16, cure=is_cured)
        pool = trial.pytorch(budget, cure=is_cured)
        kept = [pool.empty(weights), pool.empty(peak)]
        answer = pool.refuses(room // BLOCK * BLOCK)
        if is_cured:
            trial.published("keys and values", "12116 MiB", room // BLOCK * BLOCK, cure=True)
            trial.cured("all within the budget", "fits", answer)
        del kept


CASE = Case(
    title="A cache that is sized by a flat share goes beyond the budget",
    source="pegainfer-project/pegainfer#422",
    date="2026-06-21",
    library="pegainfer",
    kind="limits",
    version="as of June 2026",
    observed="Of 24,112 MiB, 90 % may be used, Qwen3-4B has 9,094 and a run 337 more. A flat "
    "share of 85 % of what is free makes 5,673 blocks; a profile makes 5,385 for 86,144 tokens.",
    why="A share of what is free knows neither the budget nor what a run needs. Its blocks, the "
    "weights and that peak have 22,195 MiB together, and the budget is 21,701.",
    cure="measure one run, and give the cache what is left of the budget",
    upstream="Closed; the cache is sized by a profile.",
    inferred=(
        "A block has 2.25 MiB: 16 tokens of Qwen3-4B in two bytes.",
        "One block is kept back, as the published tokens show.",
    ),
    reproduce=reproduce,
)
