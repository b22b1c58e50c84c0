"""Two runs on one page: what grew, above what the page shows of the second run.

The value of `data_of` has one more key then:

diff : as `Diff.as_dict` returns it (`bfc_tools.study.growth`), with at most 200 rows in each list,
    those that changed most; "left_out" counts the others. Long names lose their middle
"""

from __future__ import annotations

import os
from typing import Any

from bfc.trace import Trace
from bfc_tools.browser.data import data_of
from bfc_tools.browser.tables import shortened
from bfc_tools.study.growth import KINDS, Diff

#: The most rows of each list.
MOST_ROWS = 200


def data_of_diff(found: Diff, a: Trace, b: Trace) -> dict[str, Any]:
    """What a page shows of two runs: as `data_of` returns it, with "diff". The blocks are those of
    the second run, which stands before the first in "runs"."""
    shown = found.as_dict(MOST_ROWS)
    for moment in (shown["peak"], shown["end"]):
        for kind in KINDS:
            for row in moment[f"by_{kind}"]:
                row["name"] = shortened(row["name"])
    shown["remarks"] = [shortened(remark) for remark in found.remarks]
    names = [os.path.basename(name) for name in (found.name_a, found.name_b)]
    if names[0] == names[1]:
        names = [found.name_a, found.name_b]
    shown["a"], shown["b"] = map(shortened, names)
    title = f"{shown['b']} compared with {shown['a']}"
    return {**data_of([(names[1], b), (names[0], a)], title=title), "diff": shown}
