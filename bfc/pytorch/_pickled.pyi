from typing import Any

from bfc.pytorch._entries import Columns

def pickled(columns: Columns, device: int, settings: dict[str, Any]) -> bytes:
    """The dict of `Snapshot.to_torch` as a pickle, without making the dict. `settings` are those of the policy."""

class Writer:
    """A pickle that is being written."""
