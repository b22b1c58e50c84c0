from typing import Any

from bfc.snapshots.columns import HistoryColumns, RegionColumns

class Columns:
    def __init__(self, regions: RegionColumns, history: HistoryColumns) -> None: ...

class Writer: ...

def pickled(columns: Columns, device: int, rest: dict[str, Any]) -> bytes: ...
