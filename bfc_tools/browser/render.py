"""A report as one HTML file: the page, its styles, its scripts and the data. It loads nothing.

The page may run these scripts and styles and nothing else: a Content-Security-Policy names them by
their hashes and forbids every request. Texts of the data (a recording may come from a stranger) are
shown as text: `<` never stands in the data's block as such, and the scripts build no HTML.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
STYLES = ("vendor/uPlot.min.css", "page.css")
#: In the order in which they run. Each uses names of those before it.
SCRIPTS = (
    "vendor/uPlot.iife.min.js",
    "script/words.js",
    "script/data.js",
    "script/state.js",
    "script/sums.js",
    "script/timeline.js",
    "script/iterations.js",
    "script/map.js",
    "script/flame.js",
    "script/tree.js",
    "script/lines.js",
    "script/views.js",
    "script/block.js",
    "script/segments.js",
    "script/diff.js",
    "script/search.js",
    "script/save.js",
    "script/page.js",
)


def render(data: Mapping[str, object]) -> str:
    """The report of `data` as the text of one HTML file, which any current browser opens, from a
    disk too; it asks the network for nothing. Raises ValueError if a number of `data` is not
    finite."""
    style, script = styles(), scripts()
    parts = {
        "policy": policy(style, script),
        "style": style,
        "script": script,
        "data": json_block(data),
    }
    # One pass: a name in the data that reads as a place in the page stays a name.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], read("page.html"))


def policy(style: str, script: str) -> str:
    """The Content-Security-Policy of a page with this style and this script, and nothing else."""
    return (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def json_block(data: Mapping[str, object]) -> str:
    """`data` as JSON that can stand in a script element: no tag begins or ends within it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def styles() -> str:
    return "\n".join(read(name) for name in STYLES)


@cache
def scripts() -> str:
    """The page's scripts as one: all of ours in a scope of their own, in strict mode. The page
    shows the errors that they throw."""
    library, *ours = (read(name) for name in SCRIPTS)
    licence = f"/*! uPlot, which is not a part of bfc:\n{read('vendor/uPlot.LICENSE')}*/"
    begin, end = '(async () => {\n"use strict";', "})().catch(failed);"
    return "\n".join([licence, library, begin, *ours, end, read("script/failed.js")])


def read(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
