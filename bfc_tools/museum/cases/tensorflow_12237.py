"""tensorflow#12237: one refusal after the other, each a tenth smaller."""

from bfc_tools.museum.case import Case, Trial

LOG = ("963395584", "867056128", "780350464", "702315520", "632083968", "568875776")
FIRST = 1_070_439_424


def reproduce(trial: Trial) -> None:
    pool = trial.tensorflow("400 MiB", memory_limit=FIRST)
    pool.allocate(256)
    asked = [nbytes for _, nbytes, _ in pool.device.calls]
    trial.used("asked for first, bytes", str(FIRST), asked[0])
    for number, text in enumerate(LOG, 2):
        trial.published(f"asked for, attempt {number}", text, asked[number - 1])
    growing = trial.tensorflow("400 MiB", memory_limit=FIRST, allow_growth=True, cure=True)
    growing.allocate(256)
    asked = [nbytes for _, nbytes, _ in growing.device.calls]
    trial.cured("asked for first, with allow_growth", "2 MiB", asked[0])


CASE = Case(
    title="A program that finds the GPU taken asks again and again for nine tenths",
    source="tensorflow/tensorflow#12237",
    date="2017-08-12",
    library="TensorFlow",
    kind="growth",
    version="1.x",
    observed="Several programs on one GPU: the log of one has refusals of 1,070,439,424 bytes, then"
    " 963,395,584, and so on down to 568,875,776 and less.",
    why="Without growth a program asks for all of its limit at once, and after each refusal for "
    "nine tenths, rounded up to 256 bytes. It ends with what the others left, and fails later.",
    cure="allow_growth",
    upstream="The issue was closed.",
    inferred=("The GPU has 400 MiB left; the published part of the log ends before that.",),
    reproduce=reproduce,
)
