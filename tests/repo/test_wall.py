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
        "bin_sets chunk_count chunks counters features history owned pool_usage timing usage"
    ),
    "allocators/_captured.pyx": "history",
    "allocators/_changes.pyx": (
        "bin_sets chunk_capacity chunk_count chunks clock counters features free_slot history "
        "owned pool_usage regions safe_frontier timestamped timing usage"
    ),
    "allocators/_chunk_allocator.pxd": "bin_sets chunks",
    "allocators/_chunk_allocator.pyx": "bin_sets chunks history usage",
    "allocators/_fences.pyx": "plan_rests",
    "allocators/_frees.pyx": "bin_sets chunks pending usage",
    "allocators/_looking.pyx": "history owned",
    "allocators/_misses.pyx": "chunks owned plan plans",
    "allocators/_pages.pyx": (
        "bin_sets changed chunk_count chunks counters features has_changed history owned pages "
        "plan plan_rests plans regions starts usage"
    ),
    "allocators/_plan_use.pyx": "chunks history plan plans usage",
    "allocators/_plans.pyx": "bin_sets chunks counters plan plan_rests plans regions usage",
    "allocators/_play.pyx": "chunks features owned",
    "allocators/_private_pools.pyx": "bin_sets chunks pool_sets",
    "allocators/_reading.pxd": "bin_sets chunk_count chunks",
    "allocators/_reading.pyx": (
        "bin_sets chunk_count chunks counters features free_slot next_allocation_id owned pages "
        "plans regions starts timing usage"
    ),
    "allocators/_recorder.pyx": (
        "chunk_count chunks history next_allocation_id pool_usage regions usage"
    ),
    "allocators/_source.pyx": "bin_sets counters granularity regions",
    "allocators/_tags.pyx": "bin_sets chunk_count chunks",
    "allocators/_without_gil.pyx": "bin_sets chunks owned",
    "allocators/mapping/_address_ranges.pyx": "bin_sets chunks regions",
    "allocators/mapping/_blocks.pyx": "bin_sets chunks regions",
    "allocators/mapping/_expandable.pyx": "bin_sets chunks regions sizes",
    "allocators/mapping/_plan_ranges.pyx": "chunks plan regions",
    "allocators/mapping/_sleep.pyx": "bin_sets chunk_count chunks counters history",
    "allocators/mapping/_stitching.pyx": "bin_sets chunks counters plan regions starts",
    "backings/_pages.pyx": "kept_lane",
    "backings/_ranges.pyx": "kept_lane",
    "integrations/_torch_table.pyx": "chunks regions",
    "policies/_bfc.pyx": (
        "bin_sets chunks features granularity plan plans regions safe_frontier shared_begin "
        "timestamped"
    ),
    "policies/_caching.pyx": (
        "bin_sets chunks counters features plan prefers_older regions sizes usage"
    ),
    "policies/_releasing.pyx": "bin_sets chunks clock pool_sets regions",
}
FIELD = re.compile(r"\bpool\.(\w+)\b(?!\()")


def fields_of_the_pool() -> set[str]:
    return next(found for name, _, found in compiled_classes(CORE.read_text()) if name == "Pool")


def touched_in(path: Path, fields: set[str]) -> set[str]:
    lines = code_lines(path.read_text())
    return {name for line in lines for name in FIELD.findall(line) if name in fields}


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
    path.write_text("x = self.pool.chunks[0]\npool.free_slot = pool.find(1)   # pool.usage\n")
    assert touched_in(path, {"chunks", "free_slot", "find", "usage"}) == {"chunks", "free_slot"}
