"""`bfc.integrations.dask.Pools` on a cluster of two workers with simulated devices."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlparse

import chromium
import dask_recipes as recipes
import psutil
import pytest

import bfc
from bfc.integrations import _dask_page as page
from bfc.integrations import dask as pools
from bfc.integrations.dask import Pools, table

MIB = 1 << 20
KEYS = ("worker", "name", "device", "used", "reserved", "peak", "limit", "largest_free", "error")


def heartbeats(client: Any) -> dict[str, dict[str, Any]]:
    """The metrics of each worker, as the scheduler knows them."""
    workers = client.scheduler_info(n_workers=-1)["workers"]
    return {address: worker["metrics"] for address, worker in workers.items()}


def fetch(cluster: Any, path: str) -> str:
    port = urlparse(cluster.dashboard_link).port
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=30) as answer:
        assert answer.status == 200
        return answer.read().decode()


@pytest.fixture
def holding(client, eventually) -> dict[str, int]:
    """Pools on both workers, of which one has 3 MiB in use and the other 5; known to the scheduler.
    What is in use, by address."""
    client.register_plugin(Pools(recipes.simulated))
    client.run(recipes.drop)
    used = {}
    for address, mib in zip(sorted(heartbeats(client)), (3, 5), strict=True):
        work = client.submit(recipes.hold, mib * MIB, workers=address, pure=False)
        assert work.result() == "simulated:0"
        used[address] = mib * MIB
    assert eventually(lambda: {row["worker"]: row["used"] for row in table(client)} == used)
    return used


# Figures ----------------------------------------------------------------------------------------


def test_the_figures_of_each_pool_come_with_a_heartbeat(client, holding) -> None:
    for address, metrics in heartbeats(client).items():
        assert metrics["bfc"] == {
            "simulated:0": {
                "used": holding[address],
                "reserved": 20 * MIB,
                "peak": holding[address],
                "limit": 64 * MIB,
                "largest_free": 20 * MIB - holding[address],
            }
        }
        assert metrics["rmm"] == {"rmm-used": holding[address], "rmm-total": 20 * MIB}


def test_a_table_has_a_row_for_each_pool(client, holding) -> None:
    rows = table(client)
    assert {row["worker"]: row["used"] for row in rows} == holding
    assert all(tuple(row) == KEYS for row in rows)
    assert {row["name"] for row in rows} == {0, 1}
    assert {row["error"] for row in rows} == {None}


def test_a_table_is_a_frame_of_pandas_where_asked(client, holding) -> None:
    frame = table(client, as_frame=True)
    assert tuple(frame.columns) == KEYS
    assert dict(zip(frame["worker"], frame["used"], strict=True)) == holding


def test_a_cluster_without_pools_has_an_empty_table(client, eventually) -> None:
    assert eventually(lambda: table(client) == [])
    assert tuple(table(client, as_frame=True).columns) == KEYS


def test_tasks_get_the_pool_of_their_worker(client, eventually) -> None:
    client.register_plugin(Pools(recipes.two_devices))
    for device, mib in (("simulated:0", 3), ("simulated:1", 1)):
        client.submit(recipes.hold_on, device, mib * MIB, pure=False).result()
    assert eventually(lambda: sum(row["used"] for row in table(client)) == 4 * MIB)
    assert {row["device"]: row["limit"] for row in table(client)} == {
        "simulated:0": 64 * MIB,
        "simulated:1": 32 * MIB,
    }
    assert len(table(client)) == 4
    sums = [metrics["rmm"]["rmm-used"] for metrics in heartbeats(client).values()]
    assert sum(sums) == 4 * MIB
    with pytest.raises(LookupError, match="has no pool; it has simulated:0, simulated:1: name one"):
        client.submit(recipes.hold, MIB, pure=False).result()
    with pytest.raises(LookupError, match="has no pool for cuda:0; it has simulated:0"):
        client.submit(recipes.hold_on, "cuda:0", MIB, pure=False).result()
    client.run(recipes.drop)


def test_tasks_without_a_pool_are_told_so(client) -> None:
    with pytest.raises(LookupError, match=r"has no pool; register Pools\(recipe\) first"):
        client.submit(recipes.hold, MIB, pure=False).result()
    with pytest.raises(LookupError, match="call it in a task"):
        pools.pool()


def test_what_runs_beside_tasks_is_told_where_the_pools_are(client) -> None:
    client.register_plugin(Pools(recipes.simulated))
    assert list(client.run(recipes.devices_of).values()) == [["simulated:0"]] * 2


# The dashboard ----------------------------------------------------------------------------------


def test_the_dashboard_has_a_page_of_the_pools(client, cluster, holding) -> None:
    page = fetch(cluster, "individual-bfc-pools")
    assert "<title>bfc: pools</title>" in page
    listed = json.loads(fetch(cluster, "individual-plots.json"))
    assert listed["Individual Bfc Pools"] == "/individual-bfc-pools"


def test_the_page_shows_what_the_table_has(client, cluster, holding) -> None:
    """As a browser gets it."""
    from bokeh.client import pull_session

    port = urlparse(cluster.dashboard_link).port
    session = pull_session(url=f"http://127.0.0.1:{port}/individual-bfc-pools")
    try:
        (root,) = session.document.roots
        said, bars, shown = root.children
        assert said.text == "Nothing is wrong: 8.00 MiB in use in 2 pools."
        assert len(bars.y_range.factors) == 2
        assert [bar.glyph.right.field for bar in bars.renderers] == ["limit", "reserved", "used"]
        assert {bar.data_source.id for bar in bars.renderers} == {shown.source.id}
        assert [column.field for column in shown.columns] == list(KEYS)
        data = shown.source.data
        assert dict(zip(data["worker"], data["used"], strict=True)) == holding
        assert list(data["limit"]) == [64 * MIB] * 2
    finally:
        session.close()


#: The cells of a table: bokeh draws in shadow roots.
CELLS = """
const all = (root, selector) => [...root.querySelectorAll(selector)];
const within = root => [
    ...all(root, '.slick-cell').map(cell => cell.textContent),
    ...all(root, '*').flatMap(it => it.shadowRoot ? within(it.shadowRoot) : [])
];
return within(document);
"""


def test_a_browser_draws_the_page_and_its_changes(
    client, cluster, holding, eventually, tmp_path
) -> None:
    if chromium.missing():
        pytest.skip(str(chromium.missing()))
    port = urlparse(cluster.dashboard_link).port
    with chromium.opened(tmp_path) as page:
        page.visit(f"http://127.0.0.1:{port}/individual-bfc-pools")
        drawn = eventually(lambda: page.run(CELLS))
        for worker, used in holding.items():
            row = drawn[drawn.index(worker) :][: len(KEYS)]
            mib = used // MIB
            sizes = [f"{size}.00 MiB" for size in (mib, 20, mib, 64, 20 - mib)]
            assert row[2:] == ["simulated:0", *sizes, ""]
        client.submit(recipes.hold, 6 * MIB, workers=min(holding), pure=False).result()
        assert eventually(lambda: "9.00 MiB" in page.run(CELLS))


def row_of(name: Any, **figures: Any) -> dict[str, Any]:
    """A pool of 1 GiB, half in use."""
    known = {"used": 512, "reserved": 640, "peak": 640, "limit": 1024, "largest_free": 128}
    sizes = {key: value * MIB for key, value in (known | figures).items()}
    return {
        "worker": f"tcp://10.0.0.{name}",
        "name": name,
        "device": "cuda:0",
        "error": None,
        **sizes,
    }


def said(*rows: dict[str, Any], silent: float = 0, floors: Any = None) -> list[str]:
    addresses = {row["worker"]: silent for row in rows}
    return page.findings(rows, addresses, floors or page.Floors())


def test_the_page_says_in_sentences_what_is_wrong() -> None:
    assert said() == ["No worker has a pool: client.register_plugin(Pools(recipe)) makes them."]
    well, full, pieces = row_of(1), row_of(2, used=960, reserved=1000), row_of(3, largest_free=4)
    assert said(well) == ["Nothing is wrong: 512.00 MiB in use in 1 pool."]
    broken = row_of(4) | dict.fromkeys(KEYS[2:8]) | {"error": "worker 4 cannot make its pools"}
    assert said(pieces, full, well, broken) == [
        "worker 4 cannot make its pools.",
        "Worker 2, cuda:0 is near its limit: 960.00 MiB of 1.00 GiB in use.",
        (
            "Worker 3, cuda:0 is fragmented: of 128.00 MiB that are reserved and free, the largest "
            "piece has 4.00 MiB."
        ),
    ]
    (lost,) = said(well, silent=31.4)
    assert lost.startswith("Worker tcp://10.0.0.1 cannot be reached: it has said nothing for 31 s")


@pytest.mark.parametrize("freed", [False, True])
def test_use_that_never_goes_back_may_be_a_leak(freed: bool) -> None:
    floors = page.Floors()
    for second in range(75):
        used = 100 + 2 * second
        # A step of a training comes and goes; what is kept is what counts.
        floors.add("worker 1, cuda:0", (used + 300 * (second % 3)) * MIB, second)
        if freed and second == 40:
            floors.add("worker 1, cuda:0", 50 * MIB, second)
    found = said(row_of(1), floors=floors)
    if freed:
        assert found == ["Nothing is wrong: 512.00 MiB in use in 1 pool."]
    else:
        (sentence,) = found
        assert sentence == (
            "Worker 1, cuda:0 may leak: for 45 s it has never gone back to what it had in use "
            "before, and has 90.00 MiB more."
        )


def test_pools_of_one_name_are_told_apart() -> None:
    rows = [row_of(1), row_of(1) | {"worker": "tcp://10.0.0.9"}, row_of(2)]
    assert page.labels_of(rows) == [
        "worker 1 (tcp://10.0.0.1), cuda:0",
        "worker 1 (tcp://10.0.0.9), cuda:0",
        "worker 2, cuda:0",
    ]


def test_the_page_of_rmm_is_served_and_draws_the_figures(client, cluster, holding) -> None:
    """It draws workers whose GPU NVML knows. There is none here, so that what NVML would say of one
    is added to what the workers have said."""
    from distributed.dashboard.components.rmm import RMMMemoryUsage

    assert "bokeh" in fetch(cluster, "individual-rmm-memory").lower()
    workers = {
        address: SimpleNamespace(
            address=address,
            status="running",
            metrics=metrics | {"gpu": {"memory-used": 30 * MIB}},
            extra={"gpu": {"memory-total": 64 * MIB}},
        )
        for address, metrics in heartbeats(client).items()
    }
    page = RMMMemoryUsage(SimpleNamespace(workers=workers))
    page.update()
    assert "RMM memory used: 8.00 MiB / 40.00 MiB\n" in page.root.title.text


def test_a_scheduler_that_runs_by_itself_has_the_page_by_preload(tmp_path, eventually) -> None:
    file = tmp_path / "scheduler.json"
    command = [sys.executable, "-m", "distributed.cli.dask_scheduler"]
    options = [
        *("--host", "127.0.0.1", "--port", "0", "--dashboard-address", "127.0.0.1:0"),
        *("--preload", "bfc.integrations.dask", "--scheduler-file", str(file)),
    ]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        assert eventually(lambda: file.exists() and file.stat().st_size)
        port = json.loads(file.read_text())["services"]["dashboard"]
        there = SimpleNamespace(dashboard_link=f"http://127.0.0.1:{port}/status")
        assert "<title>bfc: pools</title>" in fetch(there, "individual-bfc-pools")
    finally:
        process.terminate()
        said = process.communicate(timeout=30)[1]
    assert "Traceback" not in said


# Workers that come and go -----------------------------------------------------------------------


def test_a_worker_that_joins_later_makes_its_pool_too(client, cluster, eventually) -> None:
    client.register_plugin(Pools(recipes.simulated))
    cluster.scale(3)
    try:
        assert eventually(lambda: len(table(client)) == 3)
        (late,) = (row["worker"] for row in table(client) if row["name"] == 2)
        work = client.submit(recipes.hold, 7 * MIB, workers=late, pure=False)
        assert work.result() == "simulated:0"
        assert eventually(lambda: 7 * MIB in [row["used"] for row in table(client)])
    finally:
        cluster.scale(2)
        assert eventually(lambda: len(heartbeats(client)) == 2)


def test_a_worker_that_dies_makes_its_pool_again(client, eventually) -> None:
    client.register_plugin(Pools(recipes.simulated))
    before = client.run(recipes.pid)
    dying = min(before)
    client.submit(recipes.hold, 7 * MIB, workers=dying, pure=False).result()
    assert eventually(lambda: 7 * MIB in [row["used"] for row in table(client)])
    os.kill(before[dying], signal.SIGKILL)

    def after() -> dict[str, int]:
        return client.run(recipes.pid, on_error="ignore")

    assert eventually(lambda: len(after()) == 2 and before[dying] not in after().values())
    assert eventually(lambda: [row["used"] for row in table(client)] == [0, 0])
    for address in after():
        assert client.submit(recipes.hold, MIB, workers=address, pure=False).result()
    client.run(recipes.drop)


def test_a_restarted_cluster_has_its_pools(client, eventually) -> None:
    client.register_plugin(Pools(recipes.simulated))
    client.restart()
    assert eventually(lambda: [row["used"] for row in table(client)] == [0, 0])


def test_another_plugin_takes_the_place_of_the_first(client, eventually) -> None:
    client.register_plugin(Pools(recipes.simulated))
    client.run(recipes.keep_pool)
    client.register_plugin(Pools(recipes.two_devices))
    assert list(client.run(recipes.are_closed).values()) == [[True]] * 2
    assert eventually(lambda: len(table(client)) == 4)


def test_the_end_of_the_plugin_closes_the_pools_and_takes_the_figures_away(
    client, eventually
) -> None:
    before = client.run(recipes.metrics_of)
    client.register_plugin(Pools(recipes.simulated))
    assert client.run(recipes.metrics_of) != before
    client.run(recipes.keep_pool)
    client.unregister_worker_plugin("bfc")
    assert list(client.run(recipes.are_closed).values()) == [[True]] * 2
    assert client.run(recipes.metrics_of) == before
    assert eventually(lambda: table(client) == [])


# What goes wrong --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        (recipes.raises, "OSError: the disk is full"),
        (recipes.no_allocator, "TypeError: the recipe returns an allocator, not str"),
        (recipes.one_device_twice, "ValueError: two allocators for simulated:0"),
    ],
)
def test_a_recipe_that_fails_is_one_error_that_names_the_worker(
    client, eventually, recipe, why
) -> None:
    workers = "|".join(heartbeats(client))
    with pytest.raises(RuntimeError, match=rf"^worker ({workers}) cannot make its pools: {why}"):
        client.register_plugin(Pools(recipe))

    def told() -> list[dict[str, Any]]:
        rows = table(client)
        start = "worker {} cannot make its pools: " + why
        return [row for row in rows if (row["error"] or "").startswith(start.format(row["worker"]))]

    assert eventually(lambda: len(told()) == 2)
    assert {row["used"] for row in table(client)} == {None}
    assert client.submit(len, "abc").result() == 3, "the workers go on"
    client.register_plugin(Pools(recipes.simulated))
    assert eventually(lambda: [row["error"] for row in table(client)] == [None, None])


def test_a_library_that_cannot_be_served_is_an_error_too(client) -> None:
    with pytest.raises(RuntimeError, match="cannot make its pools: ValueError: other libraries"):
        client.register_plugin(Pools(recipes.simulated, libraries=("cupy",)))


def test_a_worker_that_joins_later_and_fails_says_so_in_the_table(started, eventually) -> None:
    from distributed import Nanny

    with started(1) as (cluster, client):
        client.register_plugin(Pools(recipes.raises_on_late_workers))
        late = cluster.sync(start, Nanny, cluster.scheduler_address)
        try:
            assert eventually(lambda: len(table(client)) == 2)
            rows = {row["name"]: row for row in table(client)}
            assert rows.pop("late")["error"].endswith("cannot make its pools: OSError: too late")
            assert [row["error"] for row in rows.values()] == [None]
        finally:
            cluster.sync(late.close)


async def start(kind: Any, address: str) -> Any:
    """A worker that the cluster has not been asked for, as by `dask worker`."""
    return await kind(address, name="late", host="127.0.0.1", nthreads=1)


def test_wrong_arguments_are_refused_at_once() -> None:
    with pytest.raises(TypeError, match="recipe is a function, not CachingAllocator"):
        Pools(recipes.simulated())
    with pytest.raises(ValueError, match=r"the libraries are any of cupy, .*, not 'cupi'"):
        Pools(recipes.simulated, libraries=("cupi",))
    assert Pools(recipes.simulated, libraries="cupy").libraries == ("cupy",)


def test_a_client_that_is_asynchronous_has_no_table() -> None:
    with pytest.raises(ValueError, match="asynchronous"):
        table(SimpleNamespace(asynchronous=True))


class Failing(bfc.CachingAllocator):
    """A pool whose device breaks, and that may not be asked for a snapshot."""

    broken = False

    def stats(self) -> bfc.Stats:
        if self.broken:
            raise bfc.SubAllocatorError("the device has failed")
        return super().stats()

    def snapshot(self, *arguments: object, **options: object) -> bfc.Snapshot:
        raise AssertionError("a heartbeat takes no snapshot")


def test_figures_never_raise_and_are_then_the_last_that_were_known() -> None:
    pool = Failing(bfc.SimulatedSubAllocator("64 MiB"))
    worker = SimpleNamespace(metrics={"rmm": len}, address="tcp://127.0.0.1:1", executors={})
    plugin = Pools(lambda: pool)
    plugin.setup(worker)
    buffer = pool.allocate(3 * MIB)
    known = worker.metrics["bfc"](worker)
    assert known["simulated:0"]["used"] == buffer.nbytes
    pool.broken = True
    assert worker.metrics["bfc"](worker) == known
    assert worker.metrics["rmm"](worker) == {"rmm-used": 3 * MIB, "rmm-total": 20 * MIB}
    plugin.teardown(worker)
    assert worker.metrics == {"rmm": len}, "what RMM says is back"
    assert pool.closed


def test_a_heartbeat_may_be_in_the_middle_when_the_plugin_comes_and_goes() -> None:
    """It awaits metrics one by one, and logged "dictionary changed size during iteration"."""
    worker = SimpleNamespace(
        metrics={"one": len, "two": len}, address="tcp://127.0.0.1:1", executors={}
    )
    plugin = Pools(lambda: bfc.CachingAllocator(bfc.SimulatedSubAllocator("64 MiB")))
    for change in (plugin.setup, plugin.teardown):
        heartbeat = iter(worker.metrics.items())
        next(heartbeat)
        change(worker)
        assert list(heartbeat)


# Addresses --------------------------------------------------------------------------------------


def test_nothing_listens_beyond_this_machine(client) -> None:
    pids = {os.getpid(), *client.run(recipes.pid).values()}
    listening = [
        connection.laddr.ip
        for pid in pids
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening
    assert set(listening) <= {"127.0.0.1", "::1"}
