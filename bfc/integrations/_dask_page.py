"""The pools of all workers, as rows, and as a page in the dashboard of Dask's scheduler."""

from __future__ import annotations

import importlib
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from bfc.units import format_bytes

#: Where the page is.
PATH = "/individual-bfc-pools"
#: The metrics of a worker: figures by device, and what has kept it from making its pools.
FIGURES, FAULT = "bfc", "bfc-error"
#: What a row has, in order.
COLUMNS = ("worker", "name", "device", "used", "reserved", "peak", "limit", "largest_free", "error")
BYTES = COLUMNS[3:8]
MILLISECONDS = 500
#: The bars, from the widest to the narrowest: figure, colour and height.
BARS = (("limit", "#e3e7ee", 0.8), ("reserved", "#9cc0f5", 0.6), ("used", "#1f5fc4", 0.4))
#: A pool is near its limit if this part of it is in use, and in pieces if the largest free chunk is
#: below this part of what is reserved and free, which is at least this part of the limit.
NEAR, PIECES, WORTH = 0.9, 0.25, 0.1
#: How many seconds a worker may be silent.
SILENT = 20
#: A pool may leak if the least in use rose in each of so many spans of so many seconds, by this
#: part of the limit.
SPANS, SECONDS, GROWTH = 4, 15, 0.02


def rows_of(worker: str, name: Any, metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of one worker: one for each pool, or one with the error; none without `Pools`."""
    empty = dict.fromkeys(COLUMNS) | {"worker": worker, "name": name}
    if metrics.get(FAULT):
        return [empty | {"error": metrics[FAULT]}]
    return [
        empty | {"device": device} | figures for device, figures in metrics.get(FIGURES, {}).items()
    ]


class Floors:
    """The least that each pool had in use, in each of the last spans of time."""

    def __init__(self) -> None:
        self._spans: dict[str, deque[tuple[int, int]]] = {}

    def add(self, pool: str, used: int, now: float) -> None:
        """Takes over a figure."""
        spans = self._spans.setdefault(pool, deque(maxlen=SPANS + 1))
        span = int(now // SECONDS)
        if spans and spans[-1][0] == span:
            spans[-1] = span, min(used, spans[-1][1])
        else:
            spans.append((span, used))

    def risen(self, pool: str) -> int:
        """How much the least rose over the spans; 0 if it did not rise in each, or they are too
        few. The last span, which goes on, does not count."""
        least = [used for _, used in self._spans.get(pool, ())][:-1]
        rises = [after - before for before, after in pairwise(least)]
        return sum(rises) if len(rises) == SPANS - 1 and min(rises) > 0 else 0


def labels_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A different name for each row: the worker's, and its address where the name is not its own;
    and the device."""
    workers = {(row["worker"], str(row["name"])) for row in rows}
    often = Counter(name for _, name in workers)
    found = []
    for row in rows:
        address = f" ({row['worker']})" if often[str(row["name"])] > 1 else ""
        device = f", {row['device']}" if row["device"] else ""
        found.append(f"worker {row['name']}{address}{device}")
    return found


def findings(
    rows: Sequence[Mapping[str, Any]], silent: Mapping[str, float], floors: Floors
) -> list[str]:
    """What is wrong, as sentences: the worst first. One sentence that nothing is, if so. `silent`
    is how many seconds ago each worker was heard of, and `floors` what the pools had in use, by
    their labels."""
    labels = labels_of(rows)
    errors = [f"{row['error']}." for row in rows if row["error"]]
    lost = sorted(worker for worker, seconds in silent.items() if seconds > SILENT)
    for worker in lost:
        errors.append(
            f"Worker {worker} cannot be reached: it has said nothing for {silent[worker]:.0f} s, "
            "and its figures are as old."
        )
    found = [
        _of_pool(row, f"W{label[1:]}", floors.risen(label))
        for row, label in zip(rows, labels, strict=True)
    ]
    near, leaks, pieces = ([one[at] for one in found if one[at]] for at in range(3))
    if errors or near or leaks or pieces:
        return errors + near + leaks + pieces
    if not rows:
        return ["No worker has a pool: client.register_plugin(Pools(recipe)) makes them."]
    total = format_bytes(sum(row["used"] or 0 for row in rows))
    pools = "1 pool" if len(rows) == 1 else f"{len(rows)} pools"
    return [f"Nothing is wrong: {total} in use in {pools}."]


def _of_pool(row: Mapping[str, Any], label: str, risen: int) -> tuple[str, str, str]:
    """What is said of a pool that is near its limit, that may leak, and that is fragmented; "" for
    what it is not."""
    used, reserved, limit = (row[name] or 0 for name in ("used", "reserved", "limit"))
    free, largest = reserved - used, row["largest_free"] or 0
    near = leaks = pieces = ""
    if limit and used >= NEAR * limit:
        now = f"{format_bytes(used)} of {format_bytes(limit)}"
        near = f"{label} is near its limit: {now} in use."
    if limit and risen >= GROWTH * limit:
        leaks = (
            f"{label} may leak: for {(SPANS - 1) * SECONDS} s it has never gone back to what it "
            f"had in use before, and has {format_bytes(risen)} more."
        )
    if limit and free >= WORTH * limit and largest < PIECES * free:
        pieces = (
            f"{label} is fragmented: of {format_bytes(free)} that are reserved and free, the "
            f"largest piece has {format_bytes(largest)}."
        )
    return near, leaks, pieces


def register() -> None:
    """Adds the page to those of schedulers that start after this. Does nothing where bokeh, which
    the dashboard needs, is missing."""
    try:
        pages = importlib.import_module("distributed.dashboard.scheduler")
    except ImportError:
        return
    pages.applications[PATH] = show


def show(scheduler: Any, extra: Mapping[str, Any], document: Any) -> None:
    """Fills a new document of bokeh."""
    components = importlib.import_module("distributed.dashboard.components")
    page = Page(scheduler)
    page.update()
    components.add_periodic_callback(document, page, MILLISECONDS)
    document.add_root(page.root)
    document.title = "bfc: pools"


class Page:
    """What the dashboard calls a component: `root` is what is drawn, `update` reads it anew."""

    def __init__(self, scheduler: Any) -> None:
        models = importlib.import_module("bokeh.models")
        self.scheduler = scheduler
        self._changes = 0
        self._floors = Floors()
        self.source = models.ColumnDataSource({column: [] for column in (*COLUMNS, "label")})
        self.said = models.Div(
            render_as_text=True,  # names and errors come from workers
            styles={"white-space": "pre-line", "font-size": "15px", "margin": "8px"},
        )
        self.bars = self._bars()
        self.table = self._table(models)
        self.root = models.Column(self.said, self.bars, self.table, sizing_mode="stretch_both")

    def _bars(self) -> Any:
        """What is in use and reserved of each pool's limit."""
        models = importlib.import_module("bokeh.models")
        drawn = importlib.import_module("bokeh.plotting").figure(
            y_range=models.FactorRange(),
            height=120,
            sizing_mode="stretch_width",
            toolbar_location=None,
            tools="",
        )
        for name, colour, height in BARS:
            drawn.hbar(
                y="label",
                right=name,
                height=height,
                color=colour,
                source=self.source,
                legend_label={"used": "in use"}.get(name, name),
            )
        drawn.x_range.start = 0
        drawn.xaxis.formatter = models.NumeralTickFormatter(format="0.0 b")
        drawn.xaxis.ticker = models.AdaptiveTicker(
            base=1024, mantissas=[2**power for power in range(10)]
        )
        drawn.ygrid.visible = False
        drawn.y_range.range_padding = 0.1
        legend = drawn.legend[0]
        legend.orientation = "horizontal"
        drawn.add_layout(legend, "above")
        return drawn

    def _table(self, models: Any) -> Any:
        text = models.StringFormatter(null_format="")
        size = models.NumberFormatter(format="0.00 b", text_align="right", null_format="")
        return models.DataTable(
            source=self.source,
            columns=[
                models.TableColumn(
                    field=column,
                    title=column.replace("_", " "),
                    formatter=size if column in BYTES else text,
                )
                for column in COLUMNS
            ],
            index_position=None,
            reorderable=False,  # which needs another library
            sizing_mode="stretch_both",
        )

    def update(self) -> None:
        """Takes over what the last heartbeats have brought."""
        now = time.time()
        silent = {
            worker.address: now - worker.last_seen for worker in self.scheduler.workers.values()
        }
        rows = [
            row
            for worker in self.scheduler.workers.values()
            for row in rows_of(worker.address, worker.name, worker.metrics)
        ]
        data = {column: [row[column] for row in rows] for column in COLUMNS}
        data["name"] = [str(name) for name in data["name"]]
        data["label"] = labels = labels_of(rows)
        for row, label in zip(rows, labels, strict=True):
            if row["used"] is not None:
                self._floors.add(label, row["used"], now)
        said = "\n".join(findings(rows, silent, self._floors))
        if said != self.said.text:
            self.said.text = said
        if labels != self.source.data["label"]:
            self.bars.y_range.factors = labels[::-1]
            self.bars.height = 100 + 34 * len(labels)
        if data != self.source.data:
            self.source.data = data
            # A table of bokeh 3.9 is drawn anew when it gets other rows or another property, but
            # not when only the numbers in its rows change.
            self._changes += 1
            self.table.tags = [self._changes]
