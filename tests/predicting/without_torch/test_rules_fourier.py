"""What cuFFT works in, as an H100 had it."""

from __future__ import annotations

import pytest

from bfc_tools.predicting.rules.fourier import workspace


@pytest.mark.parametrize(
    ("lengths", "count", "kind", "measured"),
    [
        ([1024], 16, "r2c", 0),
        ([64, 64], 64, "r2c", 0),
        ([729], 12, "c2c", 0),
        ([260], 2032, "c2r", 0),
        ([97], 388, "c2c", 0),
        ([97, 192], 4, "c2r", 0),
        ([65536], 3, "r2c", 786456),
        ([65536], 3, "c2c", 1572864),
        ([2310], 12, "r2c", 110880),
        ([2046], 16, "c2r", 130944),
        ([1456], 12, "c2r", 69888),
        ([446], 96, "c2r", 171264),
        ([1009], 16, "r2c", 130112),
        ([127, 131], 16, "c2c", 2129728),
        ([4618], 12, "c2r", 443872),
        ([10007], 7, "c2c", 2269184),
        ([10007], 7, "r2c", 1616608),
        ([131070], 3, "c2r", 7866344),
    ],
)
def test_workspaces_are_near_those_that_were_measured(
    lengths: list[int], count: int, kind: str, measured: int
) -> None:
    real = 4 * count
    for length in lengths:
        real *= length
    sided = real // lengths[-1] * (lengths[-1] // 2 + 1) * 2
    result = {"c2c": 2 * real, "c2r": real, "r2c": sided}[kind]
    found = workspace(lengths, real, result, kind == "c2c")
    assert found == pytest.approx(measured, rel=0.15 if max(lengths) > 8192 else 0.01)
