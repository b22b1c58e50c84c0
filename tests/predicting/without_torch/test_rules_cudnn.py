"""What cuDNN 9.19 asked for on an H200, which rules estimate."""

from __future__ import annotations

import pytest
from rule_calls import Shape

from bfc.predicting.rules import convolution, recurrent


@pytest.mark.parametrize(
    ("images", "weight", "strides", "measured"),
    [
        ((4, 128, 32, 32), (256, 128, 3, 3), (1, 1), 7471120),
        ((32, 3, 224, 224), (64, 3, 7, 7), (2, 2), 122065680),
        ((32, 256, 14, 14), (256, 256, 3, 3), (1, 1), 15204368),
        ((32, 64, 56, 56), (256, 64, 1, 1), (1, 1), 0),
        ((16, 3, 224, 224), (96, 3, 4, 4), (4, 4), 0),
        ((4, 3, 256, 256), (32, 3, 3, 3), (1, 1), 0),
    ],
)
def test_the_workspace_of_a_convolution(images, weight, strides, measured) -> None:
    sizes = [size // step for size, step in zip(images[2:], strides, strict=True)]
    result = Shape((images[0], weight[0], *sizes))
    found = convolution.workspace_bytes(Shape(images), Shape(weight), result, 1, strides, True)
    assert found == measured


@pytest.mark.parametrize(
    ("kind", "steps", "hidden", "layers", "directions", "dropout", "measured"),
    [
        ("lstm", 4096, 512, 2, 1, False, 92274944),
        ("lstm", 4096, 512, 1, 1, False, 41943296),
        ("lstm", 1024, 256, 2, 2, True, 23200000),
        ("gru", 4096, 512, 2, 1, False, 109052160),
        ("rnn_tanh", 4096, 512, 1, 1, False, 8388864),
        ("lstm", 1280, 1024, 3, 1, False, 89129216),
        ("lstm", 80, 128, 1, 1, False, 205056),
    ],
)
def test_the_reserve_of_a_network(
    kind, steps, hidden, layers, directions, dropout, measured
) -> None:
    found = recurrent.reserve_bytes(kind, steps, hidden, layers, directions, 4, dropout)
    assert found == measured
