"""A snapshot as PyTorch writes it: the dict of `torch.cuda.memory._snapshot()`, as a pickle.

It has the form that the viewers at pytorch.org/memory_viz and in `torch.cuda._memory_viz`
accept (PyTorch's behaviour, 3.5).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from bfc.pytorch._serialized import Columns, pickled
from bfc.pytorch.rules import NEWEST, rules_of

if TYPE_CHECKING:
    from bfc.pytorch.settings import CachingSettings
    from bfc.snapshots.columns import HistoryColumns, RegionColumns

#: No device has a higher ordinal; `device_traces` gets an empty list for each one below.
HIGHEST_DEVICE = 1023


def written(
    device: str,
    regions: RegionColumns,
    history: HistoryColumns,
    settings: CachingSettings | None,
    torch: str = NEWEST,
) -> bytes:
    """The dict of `Snapshot.to_torch` as the version `torch` writes it, pickled with protocol 4."""
    rest = rest_as_torch(settings, torch)
    return pickled(Columns(regions, history), ordinal_of(device), rest)


def ordinal_of(device: str) -> int:
    """The number after the last colon of a device's name; 0 if there is none."""
    found = re.search(r":(\d{1,4})$", device)
    number = int(found[1]) if found else 0
    return number if number <= HIGHEST_DEVICE else 0


def rest_as_torch(settings: CachingSettings | None, torch: str) -> dict[str, Any]:
    """What follows the segments and the history. Lists of pinned memory are empty, as in PyTorch
    where the history of that memory is not recorded."""
    rest: dict[str, Any] = {
        "allocator_settings": settings_as_torch(settings, torch),
        "external_annotations": [],
    }
    return rest | (
        {"host_segments": [], "host_traces": []} if rules_of(torch).has_host_history else {}
    )


def settings_as_torch(settings: CachingSettings | None, torch: str = NEWEST) -> dict[str, Any]:
    """The settings as PyTorch writes them; its defaults for None, another policy."""
    if settings is None:
        from bfc.pytorch.settings import CachingSettings

        settings = CachingSettings()
    return dict(settings.as_torch(torch))
