"""What rules say that they were read in is there, as far as a wheel of PyTorch has it: its Python
files, and headers."""

from __future__ import annotations

from pathlib import Path

import torch

from bfc_tools.predicting import known_values  # noqa: F401  # which registers more
from bfc_tools.predicting.about import about
from bfc_tools.predicting.rules.operators import AROUND, OPERATORS, Source

TORCH = Path(torch.__file__).parent


def installed(source: Source) -> Path | None:
    """Where a file is in the wheel."""
    header = source.path.removeprefix("aten/src/")
    for path in (TORCH / "include" / header, TORCH.parent / source.path):
        if path.is_file():
            return path
    return None


def sources() -> set[Source]:
    facts = [one for spec in OPERATORS.values() for one in spec.facts]
    return {source for one in (*facts, *AROUND.values()) for source in one.sources}


def test_files_and_functions_are_where_rules_say() -> None:
    found = {source: path for source in sources() if (path := installed(source)) is not None}
    assert len(found) > 40
    missing = [
        f"{source.path}: {name}"
        for source, path in found.items()
        for name in source.functions
        if name not in path.read_text("utf-8")
    ]
    assert missing == []


def test_python_files_of_pytorch_are_all_there() -> None:
    lost = [one.path for one in sources() if one.path.endswith(".py") and one.path[:6] == "torch/"]
    assert lost
    assert [path for path in lost if not (TORCH.parent / path).is_file()] == []


def test_an_operator_without_a_record_is_said_to_have_none() -> None:
    assert about("aten::relu").startswith("aten::relu\nnot known:\n  whether its kernel for CUDA")
