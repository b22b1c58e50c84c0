"""pytorch#161139: roundup_power2_divisions of one."""

from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    one, two = (
        trial.pytorch("24 GiB", f"roundup_power2_divisions:[>:{divisions}]") for divisions in (1, 2)
    )
    kept = [one.empty("514 MiB"), two.empty("514 MiB")]
    trial.published("allocated, one division", "514 MiB", one.allocated)
    trial.published("allocated, two divisions", "768 MiB", two.allocated)
    trial.published("reserved, two divisions", "768 MiB", two.reserved)
    del kept


CASE = Case(
    title="One division does not round up to powers of two: it does nothing",
    source="pytorch/pytorch#161139",
    date="2025-08-21",
    library="PyTorch",
    kind="rounding",
    version="2.8",
    observed="With roundup_power2_divisions:[>:1] a request of 514 MiB is not rounded up to 1024 "
    "MiB; with two divisions it becomes 768 MiB.",
    why="The rounding is entered only where the number of divisions is above one. One means off, "
    "which is the default, too.",
    cure="",
    upstream="The issue was closed.",
    inferred=(),
    reproduce=reproduce,
)
