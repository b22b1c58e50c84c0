"""slime#1951: copies of the logits of a batch that nothing limited."""

from bfc_tools.museum.case import Case, Trial

EACH = 76_032 * 4  # half of a vocabulary, in single precision


def reproduce(trial: Trial) -> None:
    for tokens, text in (205_280, "58.15 GiB"), (103_756, "29.39 GiB"), (9216, "2.6 GiB"):
        pool = trial.pytorch("140 GiB", cure=tokens == 9216)
        kept = [pool.empty(tokens * EACH), pool.empty(tokens * EACH)]
        say = trial.used if tokens == 9216 else trial.published
        say(f"a copy, {tokens:,} tokens", text, kept[0].nbytes)
        answer = pool.refuses(tokens * EACH)
        if tokens == 205_280:
            trial.published("another one beside two", "refused", answer)
        elif tokens == 9216:
            trial.cured("another one beside two, 9,216 tokens", "fits", answer)
        del kept


CASE = Case(
    title="A batch with 22 times the tokens of its limit asks for 58 GiB at once",
    source="THUDM/slime#1951",
    date="2026-06-03",
    library="PyTorch",
    kind="limits",
    version="as of June 2026, slime 0.2.4",
    observed="With at most 9,216 tokens a GPU a copy of the logits should take 2.6 GiB, and 58.15 "
    "are asked for and refused; in another step 29.39.",
    why="The limit was not used where batches of the training are made, so that one had 205,280 "
    "tokens. Each of the log-probabilities and the entropy copies the logits, in single precision.",
    cure="batches that keep to the limit",
    upstream="Later versions balance the tokens of batches; slime#2152 was merged, too.",
    inferred=(
        "An H200 with 140 GiB, and two copies beside the one that is refused.",
        "The numbers of tokens are the thread's, which has them from the sizes.",
    ),
    reproduce=reproduce,
)
