"""`tensorflow="2.23"` against what the nightly build of TensorFlow answered: every address,
refusal, figure, chunk and call of the device in 300 random histories, growing and fixed, with
alignments up to 2 MiB, and in 300 more where requests come from two ends. `make peers-nightly`
compares with the build itself, and the build with the file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from nightly_answers import ENDS_FILE, FILE, HISTORIES, OursAlone, answers_of

PARTS = 5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", [FILE, ENDS_FILE], ids=["one end", "two ends"])
@pytest.mark.parametrize("part", range(PARTS))
def test_recorded_histories_are_placed_as_the_nightly_did(path: Path, part: int) -> None:
    with np.load(path) as file:
        places, counts, digests = file["places"], file["counts"], file["digests"]
    ends = np.cumsum(counts)
    assert len(counts) == HISTORIES
    assert (places == 0).sum() > 1000  # refused
    for seed in range(part, HISTORIES, PARTS):
        ours, digest = answers_of(OursAlone, seed, path == ENDS_FILE)
        assert ours == places[ends[seed] - counts[seed] : ends[seed]].tolist(), f"seed {seed}"
        assert digest == digests[seed].tobytes(), f"seed {seed}"
