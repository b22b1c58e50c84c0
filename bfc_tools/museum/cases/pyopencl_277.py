"""pyopencl#277: the sizes of a log, in their order."""

from bfc_tools.museum.case import Case, Trial
from bfc_tools.museum.other_pools import pyopencl_size

LOG = (
    (16_777_216, "20971519"), (67_108_864, "83886079"), (67_108_864, "83886079"), (256, "319"),
    (1_024, "1279"), (1_024, "1279"), (256, "319"), (1_024, "1279"), (1_024, "1279"),
    (16_777_216, "20971519"), (67_108_864, "83886079"), (67_108_864, "83886079"),
    (262_144, "327679"), (67_108_864, "83886079"),
)  # fmt: skip


def reproduce(trial: Trial) -> None:
    for size, text in dict(LOG).items():
        trial.published(f"taken for {size:,} bytes", text, pyopencl_size(size))
    taken, unasked = 1_867_150_544, 373_428_480
    trial.used("taken before", "1867150544", taken)
    trial.used("not asked for before", "373428480", unasked)
    for number, (size, _) in enumerate(LOG[1:]):
        taken, unasked = taken + pyopencl_size(size), unasked + pyopencl_size(size) - size
        if number == 11:
            trial.published("not asked for after the eleventh", "444798324", unasked)
    trial.published("taken in the end", "2307885891", taken)
    pool = trial.pytorch("4 GiB", cure=True)
    kept = [pool.empty(size) for size, _ in LOG]
    unasked = pool.allocated - sum(size for size, _ in LOG)
    trial.cured("not asked for, of the same log in PyTorch's allocator", "512 B", unasked)
    del kept


CASE = Case(
    title="A pool of OpenCL memory takes a quarter more than each power of two",
    source="inducer/pyopencl#277",
    date="2019-02-23",
    library="PyOpenCL",
    kind="rounding",
    version="2017.2",
    observed="Of 2,985 MiB that the pool has taken, 613 were never asked for: 20,971,519 bytes for "
    "16,777,216, and 319 for 256. A program that should just fit does not.",
    why="The pool keeps blocks in bins, and asks for the largest size of a bin so that any block "
    "fits all of its requests. Powers of two are the smallest size of theirs.",
    cure='bfc.opencl.DeviceAllocator("caching"), whose blocks are split and joined',
    upstream="The issue was closed. The pool takes leading_bits_in_bin_id now, 4 by default.",
    inferred=("The pool is a model of its bins: two leading bits below the power of two.",),
    reproduce=reproduce,
)
