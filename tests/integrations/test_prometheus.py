"""The metrics of pools, as Prometheus reads them."""

from __future__ import annotations

import gc
import sys
import threading
import urllib.request

import pytest

import bfc
from bfc.integrations.prometheus import Collector

prometheus = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")
MIB = 1 << 20


@pytest.fixture
def registry():
    return prometheus.CollectorRegistry()


@pytest.fixture
def collector(registry):
    return Collector(registry)


def a_pool(capacity: str = "64 MiB", **options) -> bfc.BFCAllocator:
    return bfc.BFCAllocator(bfc.SimulatedSubAllocator(capacity), **options)


def exposed(registry) -> str:
    return prometheus.generate_latest(registry).decode()


def sample(registry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"device": "simulated:0", **labels})


def test_the_text_that_prometheus_reads(registry, collector):
    """As the parser of prometheus_client reads it: names, kinds, labels and values."""
    pool = a_pool(allow_growth=True, memory_limit="32 MiB")
    with bfc.owner("kv cache"):
        pool.allocate_raw(3 * MIB)
    pool.deallocate_raw(pool.allocate_raw(MIB))
    collector.add("decoder", pool)
    text = exposed(registry)
    labels = {"pool": "decoder", "device": "simulated:0"}
    found = {}
    for family in parser.text_string_to_metric_families(text):
        (one,) = family.samples
        assert {name: one.labels[name] for name in labels} == labels
        found[one.name] = family.type, one.value
    stats = pool.stats()
    assert found == {
        "bfc_used_bytes": ("gauge", 4 * MIB),
        "bfc_peak_used_bytes": ("gauge", 5 * MIB),
        "bfc_reserved_bytes": ("gauge", stats.pool_bytes),
        "bfc_limit_bytes": ("gauge", 32 * MIB),
        "bfc_largest_free_bytes": ("gauge", stats.largest_free_block_bytes),
        "bfc_fragmentation_ratio": ("gauge", stats.fragmentation),
        "bfc_owner_used_bytes": ("gauge", 4 * MIB),
        "bfc_allocations_total": ("counter", 2),
        "bfc_faults_total": ("counter", 0),
    }
    assert 'bfc_owner_used_bytes{device="simulated:0",owner="kv cache",pool="decoder"}' in text
    assert "# HELP bfc_reserved_bytes Bytes taken from the device.\n" in text


def test_a_scrape_over_http(registry, collector):
    pool = a_pool()
    pool.deallocate_raw(pool.allocate_raw(1000))
    collector.add("decoder", pool)
    server, thread = prometheus.start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics") as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    names = {line.split("{")[0] for line in text.splitlines() if not line.startswith("#")}
    assert {name for name in names if name.startswith("bfc_")} == {
        *("bfc_used_bytes", "bfc_peak_used_bytes", "bfc_reserved_bytes", "bfc_limit_bytes"),
        *("bfc_largest_free_bytes", "bfc_allocations_total", "bfc_faults_total"),
        "bfc_fragmentation_ratio",
    }


def test_owners_are_bounded_and_add_up(registry):
    collector = Collector(registry, owners=3)
    pool = bfc.CachingAllocator(bfc.SimulatedSubAllocator("1 GiB"))
    for number in range(9):
        with bfc.owner(f"owner {number}"):
            pool.allocate_raw(MIB * (number + 1))
    pool.allocate_raw(700)
    collector.add("a", pool)
    (family,) = (it for it in collector.collect() if it.name == "bfc_owner_used_bytes")
    found = {it.labels["owner"]: it.value for it in family.samples}
    assert set(found) == {"owner 8", "owner 7", "owner 6", "(no owner)", "(other owners)"}
    assert (
        sum(found.values())
        == pool.stats().bytes_in_use
        == sample(registry, "bfc_used_bytes", pool="a")
    )


@pytest.mark.parametrize("name", ['a"b\\c\nd', "\ud800", "x" * 1000, "<script>"])
def test_any_name_can_be_sent(registry, collector, name):
    pool = a_pool()
    with bfc.owner(name):
        pool.allocate_raw(1000)
    collector.add(name, pool)
    text = exposed(registry)
    (line,) = (it for it in text.splitlines() if it.startswith("bfc_owner_used_bytes{"))
    assert line.endswith(" 1024.0")
    assert len(line) < 700


def test_pools_stand_side_by_side(registry, collector):
    first, second = a_pool(), a_pool()
    second.allocate_raw(MIB)
    collector.add("a", first)
    collector.add("b", second)
    assert sample(registry, "bfc_used_bytes", pool="a") == 0
    assert sample(registry, "bfc_used_bytes", pool="b") == MIB
    with pytest.raises(ValueError, match="another pool is shown as 'b'"):
        collector.add("b", first)
    collector.add("b", second)
    collector.remove("b")
    collector.remove("b")
    collector.add("b", first)
    assert sample(registry, "bfc_used_bytes", pool="b") == 0


def test_a_pool_that_is_gone_is_not_shown(registry, collector):
    closed, dropped = a_pool(), a_pool()
    collector.add("closed", closed)
    collector.add("dropped", dropped)
    closed.close()
    del dropped
    gc.collect()
    assert "pool=" not in exposed(registry)
    again = a_pool()
    collector.add("closed", again)
    assert sample(registry, "bfc_used_bytes", pool="closed") == 0


def test_a_pool_that_fails_hides_no_other(registry, collector, monkeypatch):
    class Failing(bfc.BFCAllocator):
        def stats(self):
            raise bfc.SubAllocatorError("the device is lost")

    pool, bad = a_pool(), Failing(bfc.SimulatedSubAllocator("1 MiB"))
    collector.add("good", pool)
    collector.add("bad", bad)
    assert sample(registry, "bfc_used_bytes", pool="good") == 0
    assert sample(registry, "bfc_used_bytes", pool="bad") is None
    assert sample(registry, "bfc_faults_total", pool="bad") == 3  # each look is a scrape


def test_it_never_takes_a_snapshot(registry, collector):
    class Watched(bfc.BFCAllocator):
        def snapshot(self, **options):
            pytest.fail("a scrape took a snapshot")

    pool = Watched(bfc.SimulatedSubAllocator("1 MiB"))
    collector.add("a", pool)
    assert "bfc_used_bytes{" in exposed(registry)


def test_scrapes_while_pools_come_and_go(registry, collector):
    stop = threading.Event()
    faults = []

    def scrape():
        while not stop.is_set():
            try:
                exposed(registry)
            except Exception as error:
                faults.append(error)

    threads = [threading.Thread(target=scrape) for _ in range(2)]
    for thread in threads:
        thread.start()
    for number in range(200):
        pool = a_pool("1 MiB")
        collector.add(f"pool {number % 5}", pool)
        pool.allocate_raw(100)
        if number % 2:
            pool.close()
        else:
            collector.remove(f"pool {number % 5}")
    stop.set()
    for thread in threads:
        thread.join()
    assert faults == []


def test_finalisers_may_remove_pools_in_the_middle_of_a_scrape(registry, collector):
    """They run wherever the collector of garbage does: a scrape raised, and showed nothing."""
    pool = a_pool()
    for number in range(2500):  # more tuples than Python keeps at hand
        collector.add(f"pool {number}", pool)

    class Session:
        def __init__(self) -> None:
            self.itself = self
            collector.add("session", pool)

        def __del__(self) -> None:
            collector.remove("session")

    before = gc.get_threshold()
    try:
        for turn in range(60):
            gc.disable()
            Session()
            gc.set_threshold(gc.get_count()[0] + 1 + 40 * turn)
            gc.enable()
            assert len(collector._open_pools()) >= 2500
    finally:
        gc.set_threshold(*before)
        gc.enable()


def test_a_pool_that_is_removed_while_it_fails_leaves_no_count(collector):
    class Removed(bfc.BFCAllocator):
        def stats(self) -> bfc.Stats:
            collector.remove("removed")
            raise bfc.SubAllocatorError("the device has failed")

    pool = Removed(bfc.SimulatedSubAllocator("1 MiB"))
    collector.add("removed", pool)
    assert len(list(collector.collect())) == 9
    assert collector._faults == {}


def test_what_is_wrong_is_refused(registry, collector):
    with pytest.raises(TypeError, match="expected an allocator, not str"):
        collector.add("a", "pool")
    with pytest.raises(TypeError, match="a name is a text"):
        collector.add(7, a_pool())
    with pytest.raises(ValueError, match="owners is how many"):
        Collector(registry, owners=-1)
    with pytest.raises(ValueError, match="Duplicated"):
        Collector(registry)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(bfc.DeviceUnavailableError, match="try: pip install prometheus_client"):
        Collector()


@pytest.mark.parametrize(
    ("first", "second"), [("x" * 256 + "a", "x" * 256 + "b"), ("pool \ud800", "pool \udfff")]
)
def test_names_that_prometheus_cannot_tell_apart_are_refused(collector, first, second):
    pools = a_pool(), a_pool()
    collector.add(first, pools[0])
    with pytest.raises(ValueError, match="another pool is shown as"):
        collector.add(second, pools[1])
    collector.remove(second)  # as Prometheus has it, it is the same name
    collector.add(second, pools[1])
