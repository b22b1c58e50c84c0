"""The pools of all workers, as rows, and as a page in the dashboard of Dask's scheduler."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

#: Where the page is.
PATH = "/individual-bfc-pools"
#: The metrics of a worker: figures by device, and what has kept it from making its pools.
FIGURES, FAULT = "bfc", "bfc-error"
#: What a row has, in order.
COLUMNS = ("worker", "name", "device", "used", "reserved", "peak", "limit", "largest_free", "error")
BYTES = COLUMNS[3:8]
MILLISECONDS = 500


def rows_of(worker: str, name: Any, metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of one worker: one for each pool, or one with the error; none without `Pools`."""
    empty = dict.fromkeys(COLUMNS) | {"worker": worker, "name": name}
    if metrics.get(FAULT):
        return [empty | {"error": metrics[FAULT]}]
    return [
        empty | {"device": device} | figures for device, figures in metrics.get(FIGURES, {}).items()
    ]


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
        self.source = models.ColumnDataSource({column: [] for column in COLUMNS})
        text = models.StringFormatter(null_format="")
        size = models.NumberFormatter(format="0.00 b", text_align="right", null_format="")
        self.root = models.DataTable(
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
        rows = [
            row
            for worker in self.scheduler.workers.values()
            for row in rows_of(worker.address, worker.name, worker.metrics)
        ]
        data = {column: [row[column] for row in rows] for column in COLUMNS}
        data["name"] = [str(name) for name in data["name"]]
        if data != self.source.data:
            self.source.data = data
            # A table of bokeh 3.9 is drawn anew when it gets other rows or another property, but
            # not when only the numbers in its rows change.
            self._changes += 1
            self.root.tags = [self._changes]
