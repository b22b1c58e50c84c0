"""Figures of allocators for Prometheus, by the package prometheus_client."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator
from typing import Any

from bfc.allocators._allocator import Allocator
from bfc.errors import ClosedError
from bfc.integrations._shared import client
from bfc.interpreter._process import ForkSafeLock
from bfc.snapshots.figures import figures, largest_owners
from bfc.snapshots.snapshot import Stats

LABELS = ("pool", "device")
#: The metrics that `figures` has, and what is said about them.
GAUGES = {
    "bfc_used_bytes": ("used", "Bytes of the chunks in use."),
    "bfc_peak_used_bytes": ("peak", "The most bytes that were in use."),
    "bfc_reserved_bytes": ("reserved", "Bytes taken from the device."),
    "bfc_limit_bytes": ("limit", "The most bytes that the pool may take."),
    "bfc_largest_free_bytes": ("largest_free", "Bytes of the largest free chunk."),
}
FRAGMENTATION = "Part of the free bytes outside the largest free chunk. None where nothing is free."
ALLOCATIONS = "Allocations since the pool was made, or its counts restarted."
OWNERS = "Bytes in use by owner: the largest by name, and all others together."
FAULTS = "How often the figures of the pool could not be read."
LONGEST_LABEL = 256


class Collector:
    """Shows pools in Prometheus, under names that you give them.

    Parameters
    ----------
    registry : prometheus_client.CollectorRegistry, optional
        Where it registers itself. The default is prometheus_client.REGISTRY, which
        `prometheus_client.start_http_server` serves.
    owners : int, optional
        How many owners of a pool are named at most, the largest (`bfc.owner`). All others have the
        label "(other owners)" together, and memory without an owner has "(no owner)".

    Raises
    ------
    DeviceUnavailableError
        If the package prometheus_client is not installed.
    ValueError
        If `owners` is negative, or the registry has such a collector already.

    Notes
    -----
    The metrics have the labels "pool" and "device":

    - bfc_used_bytes, bfc_peak_used_bytes, bfc_reserved_bytes, bfc_limit_bytes,
      bfc_largest_free_bytes: gauges.
    - bfc_fragmentation_ratio: a gauge, from 0 to 1; none where nothing is free.
    - bfc_allocations_total: a counter.
    - bfc_owner_used_bytes: a gauge with the further label "owner". Its sum is bfc_used_bytes.
    - bfc_faults_total: a counter of the times that the figures of a pool could not be read.

    The collector keeps no pool alive. One that is closed or collected is not shown any more.

    A scrape calls `stats()` of each pool, which costs some microseconds, and never `snapshot()`.

    Examples
    --------
    >>> import bfc, prometheus_client
    >>> from bfc.integrations.prometheus import Collector
    >>> pool = bfc.BFCAllocator(bfc.SimulatedSubAllocator("1 MiB"))
    >>> registry = prometheus_client.CollectorRegistry()
    >>> collector = Collector(registry)
    >>> collector.add("decoder", pool)
    >>> labels = {"pool": "decoder", "device": "simulated:0"}
    >>> int(registry.get_sample_value("bfc_limit_bytes", labels))
    1048576
    """

    def __init__(self, registry: Any = None, *, owners: int = 20) -> None:
        if operator.index(owners) < 0:
            raise ValueError(f"owners is how many are named at most, not {owners}")
        library = client("prometheus_client", "prometheus_client")
        self._core = client("prometheus_client.core", "prometheus_client")
        self._most_owners = owners
        self._lock = ForkSafeLock()
        self._pools: dict[str, weakref.ref[Allocator]] = {}  # by label
        self._faults: dict[str, int] = {}
        (library.REGISTRY if registry is None else registry).register(self)

    def add(self, name: str, pool: Allocator) -> None:
        """Show a pool.

        Parameters
        ----------
        name : str
            The value of the label "pool".
        pool : Allocator
            The pool. It is not kept alive.

        Raises
        ------
        TypeError
            If `pool` is not an allocator, or `name` is not a text.
        ValueError
            If another pool that is open has this name, or one that Prometheus cannot tell from it:
            a label has the first 256 characters, and "?" in place of surrogates.
        """
        if not isinstance(pool, Allocator):
            raise TypeError(f"expected an allocator, not {type(pool).__name__}")
        if not isinstance(name, str):
            raise TypeError(f"a name is a text, not {type(name).__name__}")
        label = _label(name)
        with self._lock:
            known = self._pools.get(label, lambda: None)()
            if known is not None and known is not pool and not known.closed:
                raise ValueError(f"another pool is shown as {label!r}: remove it first")
            self._pools[label] = weakref.ref(pool)
            self._faults[label] = 0

    def remove(self, name: str) -> None:
        """Show a pool no more. A name that is not known is no error.

        Parameters
        ----------
        name : str
            As given to `add`.
        """
        with self._lock:
            self._pools.pop(_label(name), None)
            self._faults.pop(_label(name), None)

    def describe(self) -> Iterator[Any]:
        """The metrics without values: what prometheus_client asks for when this is registered.

        Yields
        ------
        prometheus_client.Metric
            One of each name.
        """
        yield from self._families().values()

    def collect(self) -> Iterator[Any]:
        """The metrics now: what prometheus_client asks for at each scrape.

        Yields
        ------
        prometheus_client.Metric
            One of each name, with the values of all pools.
        """
        families = self._families()
        for name, pool in self._open_pools():
            labels = [name, str(pool.device)]
            try:
                stats = pool.stats()
            except ClosedError:
                continue  # it was closed a moment ago
            except Exception:  # one pool of a failed device must not hide all other metrics
                self._count_fault(name)
            else:
                self._add(families, labels, stats)
            families["bfc_faults"].add_metric(labels, self._faults.get(name, 0))
        yield from families.values()

    def _open_pools(self) -> list[tuple[str, Allocator]]:
        """The pools that are open, by name; all others are forgotten. Finalisers that run meanwhile
        may call `add` and `remove`: the lock is re-entrant."""
        shown = []
        with self._lock:
            for name in list(self._pools):  # texts, for which no garbage is collected
                pool = self._pools.get(name, lambda: None)()
                if pool is None or pool.closed:
                    self.remove(name)
                else:
                    shown.append((name, pool))
        return shown

    def _count_fault(self, name: str) -> None:
        with self._lock:
            if name in self._faults:  # or it was removed a moment ago
                self._faults[name] += 1

    def _families(self) -> dict[str, Any]:
        gauge, counter = self._core.GaugeMetricFamily, self._core.CounterMetricFamily
        families = {name: gauge(name, said, labels=LABELS) for name, (_, said) in GAUGES.items()}
        name = "bfc_fragmentation_ratio"
        families[name] = gauge(name, FRAGMENTATION, labels=LABELS)
        name = "bfc_owner_used_bytes"
        families[name] = gauge(name, OWNERS, labels=(*LABELS, "owner"))
        for name, said in (("bfc_allocations", ALLOCATIONS), ("bfc_faults", FAULTS)):
            families[name] = counter(name, said, labels=LABELS)
        return families

    def _add(self, families: dict[str, Any], labels: list[str], stats: Stats) -> None:
        """The values of one pool."""
        now = figures(stats)
        for name, (figure, _) in GAUGES.items():
            families[name].add_metric(labels, now[figure])
        if stats.fragmentation == stats.fragmentation:  # not NaN
            families["bfc_fragmentation_ratio"].add_metric(labels, stats.fragmentation)
        families["bfc_allocations"].add_metric(labels, stats.num_allocs)
        by_label: dict[str, int] = {}
        for owner, held in largest_owners(stats.by_owner, self._most_owners).items():
            by_label[_label(owner)] = by_label.get(_label(owner), 0) + held
        for owner, held in by_label.items():
            families["bfc_owner_used_bytes"].add_metric([*labels, owner], held)


def _label(text: str) -> str:
    """A text that can be sent as UTF-8, and is not endless."""
    return text[:LONGEST_LABEL].encode("utf-8", "replace").decode()
