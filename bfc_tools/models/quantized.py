"""What quantized weights take, by the `quantization_config` of a model's configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

#: The bytes of a float, of one in 16 bits, and of a whole number in 32 bits.
FLOAT, HALF, NUMBER = 4, 2, 4

#: The bytes of a matrix of so many rows and columns, by what is said of it.
Layout = Callable[[dict[str, Any], int, int], int]


def bytes_of(model: Any, said: dict[str, Any]) -> int:
    """The bytes of a model's weights whose matrices are quantized as `said`.

    Raises ValueError with the layout's name if it is not known.
    """
    name = str(said.get("quant_method") or _older(said))
    layout = _LAYOUTS.get(name.replace("_", "-"))
    if layout is None:
        raise ValueError(
            f"bfc does not know how weights are quantized by the name of {name}: --weights says "
            "what they take"
        )
    whole = [*_names(said), *_heads(model)]
    total = 0
    for name, parameter in model.named_parameters():
        if _is_matrix(model, name, parameter) and not _is_one_of(name, whole):
            *many, rows, columns = parameter.shape
            total += math.prod(many) * layout(said, rows, columns)
        else:
            total += parameter.numel() * parameter.element_size()
    return total


def _older(said: dict[str, Any]) -> str:
    """The method of configurations that do not name one."""
    bits = said.get("load_in_4bit") or said.get("load_in_8bit")
    return "bitsandbytes" if bits else "(none)"


def _names(said: dict[str, Any]) -> Iterator[str]:
    """The parts of a model that are said not to be quantized."""
    for key in ("modules_to_not_convert", "llm_int8_skip_modules", "ignore"):
        yield from said.get(key) or ()


def _heads(model: Any) -> Iterator[str]:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    yield from (name for name, module in model.named_modules() if module is head)


def _is_matrix(model: Any, name: str, parameter: Any) -> bool:
    """Whether a parameter is the weight of a linear layer, or those of experts as one."""
    path, _, last = name.rpartition(".")
    linear = type(model.get_submodule(path)).__name__ in ("Linear", "Conv1D")
    return bool((linear and last == "weight") or (parameter.dim() == 3 and "experts" in name))


def _is_one_of(name: str, parts: list[str]) -> bool:
    for part in parts:
        if part.startswith("re:"):
            if re.match(part[3:], name.rpartition(".")[0]):
                return True
        elif f".{part}." in f".{name}":
            return True
    return False


def _groups(said: dict[str, Any], columns: int, usual: int) -> int:
    """How many parts of a row have a scale of their own. -1 and None are one."""
    size = said.get("group_size", usual)
    return math.ceil(columns / size) if size and size > 0 else 1


def _bitsandbytes(said: dict[str, Any], rows: int, columns: int) -> int:
    """bitsandbytes: in 8 bits a scale for each row; in 4 bits one for each 64 numbers, which are
    quantized again if that is asked for, 256 by 256, and the 16 numbers that there are."""
    numbers = rows * columns
    if said.get("load_in_8bit"):
        return numbers + rows * FLOAT
    blocks = math.ceil(numbers / 64)
    scales = blocks * FLOAT
    if said.get("bnb_4bit_use_double_quant"):
        scales = blocks + math.ceil(blocks / 256) * FLOAT + 256 * FLOAT + FLOAT
    return math.ceil(numbers / 2) + scales + 16 * FLOAT


def _awq(said: dict[str, Any], rows: int, columns: int) -> int:
    """AutoAWQ: packed numbers, and for each group a scale and a packed zero."""
    bits, groups = int(said.get("bits", said.get("w_bit", 4))), _groups(said, columns, 128)
    return rows * columns * bits // 8 + groups * rows * HALF + groups * rows * bits // 8


def _gptq(said: dict[str, Any], rows: int, columns: int) -> int:
    """GPTQ: the same, and the group of each column."""
    return _awq(said, rows, columns) + columns * NUMBER


def _fp8(said: dict[str, Any], rows: int, columns: int) -> int:
    """In 8 bits, with a scale for each block, or one."""
    high, wide = said.get("weight_block_size") or (rows, columns)
    return rows * columns + math.ceil(rows / high) * math.ceil(columns / wide) * FLOAT


def _mxfp4(said: dict[str, Any], rows: int, columns: int) -> int:
    """In 4 bits, with 8 bits for each 32 of them."""
    return rows * columns // 2 + rows * columns // 32


def _compressed(said: dict[str, Any], rows: int, columns: int) -> int:
    """compressed-tensors: packed numbers with a scale for each group, or row."""
    of: list[dict[str, Any]] = list((said.get("config_groups") or {}).values())
    weights = (of[0].get("weights") if of else None) or {}
    groups = _groups({"group_size": weights.get("group_size")}, columns, 0)
    return rows * columns * int(weights.get("num_bits", 8)) // 8 + groups * rows * HALF


def _torchao(said: dict[str, Any], rows: int, columns: int) -> int:
    """torchao: in 8 bits a scale for each row, and a zero for whole numbers; in 4 bits a scale and
    a zero for each group."""
    kind = said.get("quant_type")
    kind = kind.get("default", kind) if isinstance(kind, dict) else kind
    named = kind.get("_type", "") if isinstance(kind, dict) else str(kind)
    given = kind.get("_data", {}) if isinstance(kind, dict) else said.get("quant_type_kwargs") or {}
    if "int4" in named.lower():
        return rows * columns // 2 + _groups(given, columns, 128) * rows * 2 * HALF
    if "8" in named:
        return rows * columns + rows * (FLOAT + ("float" not in named.lower()))
    raise ValueError(f"bfc does not know torchao's {named}: --weights says what its weights take")


_LAYOUTS: dict[str, Layout] = {
    "bitsandbytes": _bitsandbytes,
    "awq": _awq,
    "gptq": _gptq,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed,
    "torchao": _torchao,
}
