"""Against the compiled BFC of TensorFlow's main branch, which XLA and JAX have, too: every address,
every call to the device, every statistic.

`make peers-nightly` downloads its wheel of 645 MB, and runs these. BFC_SEED=n repeats one history.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from nightly_answers import (
    ALIGNMENTS,
    ENDS_FILE,
    FILE,
    HISTORIES,
    NightlyAlone,
    answers_of,
    write_answers,
)
from tensorflow_pairs import play_on_both

from bench.peers.tensorflow import NIGHTLY, build

pytestmark = pytest.mark.peers
SEEDS = [int(os.environ["BFC_SEED"])] if "BFC_SEED" in os.environ else range(600)


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    build(version=NIGHTLY)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_histories_are_placed_alike(seed: int) -> None:
    play_on_both(seed, NIGHTLY, ALIGNMENTS if seed % 2 else (64,))


@pytest.mark.parametrize("seed", SEEDS)
def test_requests_from_two_ends_are_placed_alike(seed: int) -> None:
    play_on_both(seed, NIGHTLY, ALIGNMENTS if seed % 2 else (64,), partitioned=True)


@pytest.mark.parametrize("path", [FILE, ENDS_FILE], ids=["one end", "two ends"])
def test_the_recorded_answers_are_those_of_the_build(path: Path) -> None:
    """BFC_WRITE_ANSWERS=1 writes them anew."""
    if "BFC_WRITE_ANSWERS" in os.environ:
        write_answers(path)
    with np.load(path) as file:
        assert str(file["version"]) == NIGHTLY
        places, counts = file["places"], file["counts"]
    for seed in range(0, HISTORIES, 10):
        end = int(counts[: seed + 1].sum())
        theirs, _digest = answers_of(NightlyAlone, seed, path == ENDS_FILE)
        assert theirs == places[end - counts[seed] : end].tolist()
