"""What weights take that are quantized, by the configuration of a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from bfc_tools.models.quantized import bytes_of

#: The bytes of what stays in 16 bits: an embedding, its norm, and the head.
WHOLE = 2 * (2 * 100 * 256 + 256)
NUMBERS = 512 * 256
IN_GROUPS = {"bits": 4, "group_size": 128}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 256)
        self.layers = nn.ModuleList([nn.Linear(256, 512, bias=False)])
        self.norm = nn.RMSNorm(256)
        self.lm_head = nn.Linear(256, 100, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def model() -> nn.Module:
    return Model().to("meta", torch.bfloat16)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"quant_method": "awq", **IN_GROUPS}, NUMBERS // 2 + 2 * 512 * 2 + 2 * 512 // 2),
        (
            {"quant_method": "gptq", **IN_GROUPS},
            NUMBERS // 2 + 2 * 512 * 2 + 2 * 512 // 2 + 4 * 256,
        ),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, NUMBERS + 512 * 3 + 4 * 256),
        ({"load_in_8bit": True}, NUMBERS + 4 * 512),
        ({"load_in_4bit": True}, NUMBERS // 2 + 4 * 2048 + 64),
        (
            {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            NUMBERS // 2 + 2048 + 8 * 4 + 1024 + 4 + 64,
        ),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, NUMBERS + 4 * 4 * 2),
        ({"quant_method": "mxfp4"}, NUMBERS // 2 + NUMBERS // 32),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}},
                "ignore": ["lm_head"],
            },
            NUMBERS // 2 + 2 * 512 * 2,
        ),
        ({"quant_method": "awq", "modules_to_not_convert": ["layers"], **IN_GROUPS}, 2 * NUMBERS),
        ({"quant_method": "compressed-tensors", "ignore": [r"re:layers\.\d+"]}, 2 * NUMBERS),
    ],
)
def test_a_layout_takes_its_numbers_and_scales(said: dict[str, Any], expected: int) -> None:
    assert bytes_of(model(), said) - WHOLE == expected


def test_an_unknown_layout_is_named() -> None:
    with pytest.raises(ValueError, match="by the name of vptq: --weights"):
        bytes_of(model(), {"quant_method": "vptq"})


def test_torchao_in_4_bits_has_a_scale_and_a_zero_for_each_group() -> None:
    """In 8 bits it is compared with torchao itself, in test_real_models.py."""
    four = {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 128}}}
    taken = bytes_of(model(), {"quant_method": "torchao", "quant_type": four}) - WHOLE
    assert taken == NUMBERS // 2 + 2 * 512 * 4
