"""What other files may touch of the pool's own records: a list, so that the engine has a wall.

A method of the pool may be called from everywhere; a field that it reads or writes itself may not.
"""

from __future__ import annotations

import re
from pathlib import Path

from compiled_classes import compiled_classes
from sources import COMPILED, PACKAGE, assert_none, code_lines, file_name

CORE = PACKAGE / "_core.pxd"
#: The fields that each file touches. Take away what it needs no longer; add a method to the pool
#: rather than a name to a row.
TOUCHED = {
    "allocators/_allocator.pyx": (
        "bin_sets books.history books.owned books.pool_usage books.usage chunk_count chunks "
        "counters features times.counter"
    ),
    "allocators/_captured.pyx": "books.history",
    "allocators/_changes.pyx": (
        "bin_sets books.history books.owned books.pool_usage books.usage chunks counters "
        "features regions times.clock times.counter times.safe_frontier times.timestamped"
    ),
    "allocators/_chunk_allocator.pxd": "bin_sets chunks",
    "allocators/_chunk_allocator.pyx": "bin_sets books.history books.usage chunks",
    "allocators/_fences.pyx": "plans.rest",
    "allocators/_frees.pyx": "bin_sets books.usage chunks pending",
    "allocators/_looking.pyx": "books.history books.owned",
    "allocators/_misses.pyx": "books.owned chunks plans.all plans.current",
    "allocators/_pages.pyx": (
        "bin_sets books.history books.owned books.usage changed.any changed.bits chunk_count "
        "chunks counters features pages plans.all plans.current plans.rest regions starts"
    ),
    "allocators/_places.pyx": (
        "bin_sets books.usage chunk_count chunks features granularity plans.all plans.current "
        "records.capacity records.free_slot records.next_allocation_id regions sizes starts"
    ),
    "allocators/_plan_use.pyx": "books.history books.usage chunks plans.all plans.current",
    "allocators/_plans.pyx": (
        "bin_sets books.usage chunks counters plans.all plans.current plans.rest regions"
    ),
    "allocators/_play.pyx": "books.owned chunks features",
    "allocators/_private_pools.pyx": "bin_sets chunks lanes.pool_sets",
    "allocators/_reading.pxd": "bin_sets chunk_count chunks",
    "allocators/_reading.pyx": (
        "bin_sets books.owned books.usage chunk_count chunks counters features pages plans.all "
        "records.free_slot records.next_allocation_id regions starts times.counter"
    ),
    "allocators/_recorder.pyx": (
        "books.history books.pool_usage books.usage chunk_count chunks "
        "records.next_allocation_id regions"
    ),
    "allocators/_source.pyx": "bin_sets counters granularity regions",
    "allocators/_tags.pyx": "bin_sets chunk_count chunks",
    "allocators/_without_gil.pyx": "bin_sets books.owned chunks",
    "allocators/mapping/_address_ranges.pyx": "bin_sets chunks regions",
    "allocators/mapping/_blocks.pyx": "bin_sets chunks regions",
    "allocators/mapping/_expandable.pyx": "bin_sets chunks regions sizes",
    "allocators/mapping/_plan_ranges.pyx": "chunks plans.current regions",
    "allocators/mapping/_sleep.pyx": "bin_sets books.history chunk_count chunks counters",
    "allocators/mapping/_stitching.pyx": "bin_sets chunks counters plans.current regions",
    "backings/_pages.pyx": "lanes.kept",
    "backings/_ranges.pyx": "lanes.kept",
    "integrations/_torch_table.pyx": "chunks regions",
    "policies/_bfc.pyx": (
        "bin_sets chunks features granularity plans.all plans.current regions "
        "times.safe_frontier times.timestamped two_ends.shared_begin"
    ),
    "policies/_caching.pyx": (
        "bin_sets books.usage chunks counters features order.prefers_older regions sizes"
    ),
    "policies/_releasing.pyx": "bin_sets chunks lanes.pool_sets regions times.clock",
}
FIELD = re.compile(r"\bpool\.(\w+)\b(?:\.(\w+))?(?!\()")
PART = re.compile(r"(?m)^    cdef cppclass (\w+):\n((?:        .*\n)+)")


def fields_of_the_pool() -> set[str]:
    """Of a part, which is a structure of fields, each of them: `books.usage`."""
    text = CORE.read_text()
    fields = next(found for name, _, found in compiled_classes(text) if name == "Pool")
    parts = {name: body for name, body in PART.findall(text) if "(" not in body}
    found = set[str]()
    for field in fields:
        kind = re.search(rf"(?m)^    cdef (\w+) {field}\b", text)
        body = parts.get(kind[1], "") if kind else ""
        names = re.findall(r"(?m)^        .*?(\w+)(?:\[\w+\])?$", body)
        found |= {f"{field}.{name}" for name in names} or {field}
    return found


def touched_in(path: Path, fields: set[str]) -> set[str]:
    lines = code_lines(path.read_text())
    found = {match for line in lines for match in FIELD.findall(line)}
    return {
        field for name, inner in found for field in (name, f"{name}.{inner}") if field in fields
    }


def test_files_touch_the_fields_of_the_pool_that_they_may() -> None:
    fields = fields_of_the_pool()
    found = {
        file_name(path): touched_in(path, fields) for path in COMPILED if path.stem != CORE.stem
    }
    listed = {name: {*names.split()} for name, names in TOUCHED.items()}
    assert_none(
        f"{name} touches {field}, which it may not"
        if field in touched
        else f"{name} touches {field} no longer: take it off the list"
        for name, touched in found.items()
        for field in sorted(touched ^ listed.get(name, set()))
    )
    assert sorted({*listed} - {*found}) == []


def test_a_touch_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "some.pyx"
    path.write_text("x = self.pool.chunks[0]\npool.order.recent = pool.find(1)   # pool.usage\n")
    fields = {"chunks", "order.recent", "order.by_number", "find", "usage"}
    assert touched_in(path, fields) == {"chunks", "order.recent"}
