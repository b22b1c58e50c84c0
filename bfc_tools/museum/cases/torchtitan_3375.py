"""torchtitan#3375: snapshots of Python 3.14, which the viewer shows as nothing."""

import pickle
import tempfile
from pathlib import Path

import bfc
from bfc.pytorch.stripped import strip
from bfc_tools.museum.case import Case, Trial


def reproduce(trial: Trial) -> None:
    pool = trial.pytorch("1 GiB")
    pool.pool.record_history(context=None)
    pool.refuses("20 MiB")
    with tempfile.TemporaryDirectory() as folder:
        file, bare = Path(folder, "its.pickle"), Path(folder, "bare.pickle")
        file.write_bytes(pickle.dumps(pool.pool.snapshot().to_torch(), protocol=5))
        trial.used("version of the pickle", "5", file.read_bytes()[1])
        trial.cured("events that bfc reads from it", "2", len(bfc.Trace.from_torch(file)))
        strip(file, bare)
        trial.published("version that the viewer shows", "4", bare.read_bytes()[1], cure=True)


CASE = Case(
    title="The viewer shows nothing of a snapshot that Python 3.14 has pickled",
    source="pytorch/torchtitan#3375",
    date="2026-05-16",
    library="PyTorch",
    kind="snapshots",
    version="as of May 2026",
    observed="The page for snapshots loads and shows nothing. The files are pickles of version 5; "
    "written as version 4 they are shown.",
    why="Python 3.14 pickles in version 5 unless it is told otherwise. The viewer has a reader of "
    "its own, which knows versions up to 4.",
    cure="bfc reads them, and bfc anonymise writes version 4",
    upstream="Merged: torchtitan asks for version 4. pytorch#183842 is open.",
    inferred=("The snapshot itself: any has this fault.",),
    reproduce=reproduce,
)
