"""What predictions are made of stands on eight floors, and imports of no floor point upwards.

The order within a floor, and of all files, is that of the docstrings (`test_layers.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from sources import CHECKOUT, assert_none

ROOT = CHECKOUT / "bfc_tools" / "predicting"
HERE = "bfc_tools.predicting"

#: The lowest first. A folder stands for its `__init__`.
FLOORS = {
    "language": """kinds devices releases ordinal changes rules/interface rules/operators
        rules/tensors rules/in_place""",
    "gpu": """cudnn rules/cub rules/orders rules/shared_sums rules/convolution_workspaces
        rules/sdpa_choice""",
    "system": "kernel letters arrivals host_numbers file_layer outside guard",
    "values": "even_choices real_values known_values conditions",
    "rules": """rules rules/attention rules/choices rules/columns rules/compiled rules/compressed
        rules/convolution rules/copies rules/distributed rules/elements rules/encoder rules/files
        rules/foreach rules/fourier rules/gemm rules/gradients rules/indexing rules/inductor
        rules/losses rules/normalization rules/recurrent
        rules/reductions rules/sdpa rules/sending rules/shapes rules/solvers rules/sorting
        rules/sparse rules/stand_ins rules/storages rules/triton_kernels rules/uniques
        rules/unknowable rules/values about""",
    "record": "places memory imagined recorder hooks lengths",
    "world": "fake_torch legacy_types cuda_module nvml generation changing",
    "session": """repeats holders verdict unsure text summary prediction session stopping waiting
        evaluations endings script failures asked axes bounds tries distant clusters largest world
        ranks search cheapest whatif serves""",
}
FLOOR = {name: number for number, names in enumerate(FLOORS.values()) for name in names.split()}


def modules() -> dict[str, Path]:
    found = {path.relative_to(ROOT).with_suffix(""): path for path in ROOT.rglob("*.py")}
    named = {str(name).removesuffix("/__init__"): path for name, path in found.items()}
    return {name: path for name, path in named.items() if name != "__init__"}


def imports(text: str) -> Iterator[tuple[int, str]]:
    """The lines of imports from the folder, and what they name; those for type checkers not."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(HERE):
            base = (node.module or "")[len(HERE) :].strip(".").replace(".", "/")
            for one in node.names:
                whole = f"{base}/{one.name}".strip("/")
                yield node.lineno, whole if whole in FLOOR else base


def upwards(name: str, text: str) -> list[str]:
    return [
        f"{name}.py:{line} imports {target}"
        for line, target in imports(text)
        if target in FLOOR and FLOOR[target] > FLOOR[name]
    ]


def test_each_file_stands_on_one_floor() -> None:
    listed = " ".join(FLOORS.values()).split()
    assert sorted(listed) == sorted(modules())


def test_no_import_points_to_a_higher_floor() -> None:
    assert_none(one for name, path in modules().items() for one in upwards(name, path.read_text()))


def test_an_import_that_points_to_a_higher_floor_is_seen() -> None:
    lazy = f"def f():\n    from {HERE} import recorder, devices\n"
    assert upwards("rules/gemm", lazy) == ["rules/gemm.py:2 imports recorder"]
    named = f"from {HERE}.rules.gemm import product\n"
    assert upwards("cudnn", named) == ["cudnn.py:1 imports rules/gemm"]
    assert upwards("recorder", named) == []
    typed = f"if TYPE_CHECKING:\n    from {HERE}.recorder import Recorder\n"
    assert upwards("rules/gemm", typed) == []
