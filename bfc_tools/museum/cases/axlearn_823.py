"""axlearn#823: vectors of zeros and a one, for a large vocabulary."""

from bfc_tools.museum.case import Case, Trial

TOKENS, VOCABULARY = 32 * 1024, 256 * 1024


def reproduce(trial: Trial) -> None:
    pool = trial.tensorflow("40 GiB", memory_limit="30 GiB")
    numbers = pool.allocate(TOKENS * 4)
    trial.published("numbers of the tokens", "128 KiB", pool.in_use)
    marks = TOKENS * VOCABULARY * 4
    trial.published("one-hot vectors", "32 GiB", marks)
    del numbers
    cure = trial.tensorflow("40 GiB", memory_limit="30 GiB", cure=True)
    rows = [cure.allocate(TOKENS * 4), cure.allocate(TOKENS * 128 * 4)]
    trial.cured("rows that are looked up", "16 MiB", cure.in_use)
    rows.clear()


CASE = Case(
    title="A quantizer answers with 32 GiB of zeros where 128 KiB say the same",
    source="apple/axlearn#823",
    date="2024-11-08",
    library="JAX",
    kind="limits",
    version="as of November 2024",
    observed="With 32 thousand tokens and a vocabulary of 256 thousand, the one-hot vectors of a "
    "quantizer take 32 GB for each sequence. The numbers themselves take 128 kB.",
    why="A one-hot vector has a value for every entry of the vocabulary, and one of them is not "
    "zero. A multiplication with the codebook only picks a row, as an index does.",
    cure="numbers of the entries, and a lookup by index",
    upstream="Merged.",
    inferred=(
        "32 and 256 thousand are powers of two, and what the thread calls GB are GiB.",
        "A GPU of 40 GiB.",
        "A codebook 128 wide, in single precision.",
    ),
    reproduce=reproduce,
)
