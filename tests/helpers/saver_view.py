"""What torch_memory_saver's tests ask its compiled library, answered of our tags.

`give_view` is for a process in which our module answers `import torch_memory_saver`.
"""

from __future__ import annotations

from types import SimpleNamespace

from bfc.integrations import _by_tag, torch_memory_saver

SAVER = torch_memory_saver.torch_memory_saver


class Library:
    """The region that is open in this thread, by the calls that say so."""

    def __init__(self) -> None:
        self.outside = region("default") if SAVER._by_tag.tags else (None, None)

    def here(self) -> tuple[str | None, str | None]:
        """The tag, and where its contents go."""
        scopes = _by_tag._scopes.get()
        return region(scopes[-1].tag) if scopes else self.outside

    def tms_get_interesting_region(self) -> bool:
        return self.here()[0] is not None

    def tms_get_current_tag(self) -> bytes:
        return (self.here()[0] or "default").encode()

    def tms_get_enable_cpu_backup(self) -> bool:
        return self.here()[1] in ("host", "pinned")

    def tms_get_cpu_backup_backend(self) -> bytes:
        way = self.here()[1] or torch_memory_saver._way(True, False)
        return {"host": b"mmap", "pinned": b"pinned"}[way]


def region(name: str | None) -> tuple[str | None, str | None]:
    """Of a tag of the pool: the tag that was named, and its way."""
    found = (
        (tag, way) for tag, it in SAVER._ways.items() for way, own in it.items() if own == name
    )
    return next(found, (None, None))


def give_view() -> None:
    library = Library()
    SAVER._impl = SimpleNamespace(_binary_wrapper=SimpleNamespace(cdll=library))  # type: ignore[attr-defined]
    SAVER._ensure_initialized = lambda: None  # type: ignore[attr-defined]
