"""Operators on lists of tensors, as optimizers use them.

From PyTorch's ATen/native/cuda/ForeachReduceOp.cu (a norm for each chunk of each tensor) and
ForeachFunctors.cuh; all other operators on lists need nothing beside their results.
"""

from __future__ import annotations

from collections.abc import Iterator

from bfc_tools.predicting.rules.interface import Call, Release, Workspace
from bfc_tools.predicting.rules.operators import before, file
from bfc_tools.predicting.rules.tensors import div_up, numel, type_name

#: The elements of a chunk, which one block works on.
CHUNK = 65536


@before(
    "aten::_foreach_norm",
    "aten::_foreach_max",
    "aten::_foreach_powsum",
    source=(
        file("ATen/native/cuda/ForeachReduceOp.cu", read="2.6.0"),
        file("ATen/native/cuda/ForeachFunctors.cuh", read="2.15.0"),
    ),
)
def norms(call: Call) -> Iterator[Workspace | Release]:
    """A number for each chunk of the largest tensor, for each tensor."""
    tensors = call.args[0]
    if len({(tensor.dtype, str(tensor.device)) for tensor in tensors}) != 1:
        return
    chunks = max(div_up(numel(tensor), CHUNK) for tensor in tensors)
    size = 8 if type_name(tensors[0]) == "float64" else 4
    if call.func._schema.name == "aten::_foreach_max":
        size = int(tensors[0].element_size())
    yield Workspace(len(tensors) * chunks * size, what="norms of chunks")
