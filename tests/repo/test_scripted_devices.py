"""Tests script a device, and make no source of their own: `bfc.testing.Misbehaving` has `on`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from sources import CHECKOUT, assert_none

#: Sources that are no script over another one, but of a kind of their own, each with its reason.
KEPT = {
    "allocators/test_allocator.py::Bare": "has only what Python asks for, to be refused",
    "copying/test_opencl.py::Fenced": "a subclass whose fence must be asked",
    "cuda/test_table_streams.py::Fenced": "a subclass, which a table in C must not pass over",
    "helpers/delayed_host.py::LateHost": "host memory whose work runs late",
    "helpers/graph_histories.py::Parts": "a device for each pool and stream",
    "helpers/mapping_faults.py::AccountedDevice": "a LedgerDevice that notes what stayed mapped",
    "helpers/page_ledger.py::LedgerDevice": "keeps account of who may use which page",
    "helpers/pinned_subject.py::Device": "the device of the compiled original",
    "helpers/soak_devices.py::Cleared": "a subclass of OpenCL's source, with its native table",
    "helpers/soak_native.py::Streams": "tells a player in C what is held and freed",
    "suballocators/test_contract.py::Counted": "right, and as little as can be",
    "suballocators/test_contract.py::ForgetsMappings": "wrong, to be found by the contract",
    "suballocators/test_contract.py::Mapped": "right, and as little as can be",
    "suballocators/test_mapping.py::OnlyBlocks": "has the defaults of the base class",
    "suballocators/test_native_mapping.py::Native": "maps in C, and has no method that maps",
    "suballocators/test_native_mapping.py::Watched": "a subclass that its table must not pass by",
}
TESTS = CHECKOUT / "tests"


def sources_in(path: Path, known: set[str]) -> Iterator[str]:
    """The classes of a file that are sub-allocators, as those `known` are, which gains them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
            if any(base.endswith("SubAllocator") or base in known for base in bases):
                known.add(node.name)
                yield f"{path.relative_to(TESTS)}::{node.name}"


def own_sources() -> Iterator[str]:
    """The classes below `tests` that are sub-allocators, those of texts that are run left out."""
    known = {"IntegerSource", "Misbehaving"}
    helpers = sorted((TESTS / "helpers").rglob("*.py"))
    for _ in range(2):  # they import one another
        found = [name for path in helpers for name in sources_in(path, known)]
    yield from found
    for path in sorted(set(TESTS.rglob("*.py")).difference(helpers)):
        yield from sources_in(path, set(known))


def test_no_test_makes_a_source_of_its_own() -> None:
    assert_none(
        f"{name}: script one, with `on` of bfc.testing.Misbehaving, or say in KEPT why none can be"
        for name in own_sources()
        if name not in KEPT
    )


def test_each_source_that_is_kept_is_there() -> None:
    assert_none(sorted(KEPT.keys() - set(own_sources())))
