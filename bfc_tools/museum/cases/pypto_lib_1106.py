"""pypto-lib#1106: the experts of all layers on one card."""

from bfc_tools.museum.case import Case, Trial

LAYERS, HIDDEN, INNER = 61, 7168, 3072


def reproduce(trial: Trial) -> None:
    for experts in (48, 24):
        card = trial.pytorch("128 GiB", cure=experts == 24)
        stack = LAYERS * experts * HIDDEN * INNER
        kept = [card.empty(stack) for _ in range(2)]
        answer = card.refuses(stack)
        if experts == 48:
            trial.published("one of three stacks", "64474841088 bytes", stack)
            trial.published("three stacks", "180 GiB", 3 * stack)
            trial.published("the third stack", "refused", answer)
        else:
            trial.cured("24 experts a card", "90 GiB", 3 * stack)
            trial.cured("their third stack", "fits", answer)
        kept.clear()


CASE = Case(
    title="The experts of 61 layers on two cards need 180 GiB of each",
    source="hw-native-sys/pypto-lib#1106",
    date="2026-09-01",
    library="CANN",
    kind="limits",
    version="Ascend 950, as of September 2026",
    observed="Uploading the weights of a model's experts fails at 64,474,841,088 bytes: a card of "
    "128 GiB is to hold 180.",
    why="48 experts of all 61 layers are stacked, with a byte for each of 7,168 by 3,072 weights. "
    "There are three stacks, and only two fit.",
    cure="more cards, each with fewer experts",
    upstream="Closed.",
    inferred=("A byte a weight, as the published size shows.",),
    reproduce=reproduce,
)
