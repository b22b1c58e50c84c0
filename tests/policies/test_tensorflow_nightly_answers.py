"""`tensorflow="2.23"` against what the nightly build of TensorFlow answered: every address,
refusal, figure, chunk and call of the device in 300 random histories, growing and fixed, with
alignments up to 2 MiB. `make peers-nightly` compares with the build itself, and the build with the
file.
"""

from __future__ import annotations

import numpy as np
from nightly_answers import FILE, HISTORIES, OursAlone, answers_of


def test_recorded_histories_are_placed_as_the_nightly_did() -> None:
    with np.load(FILE) as file:
        places, counts, digests = file["places"], file["counts"], file["digests"]
    ends = np.cumsum(counts)
    assert len(counts) == HISTORIES
    assert (places == 0).sum() > 1000  # refused
    for seed in range(HISTORIES):
        ours, digest = answers_of(OursAlone, seed)
        assert ours == places[ends[seed] - counts[seed] : ends[seed]].tolist(), f"seed {seed}"
        assert digest == digests[seed].tobytes(), f"seed {seed}"
