"""Two drawings, made from text whenever the site is built, so that neither can go stale.

`{layers}` draws the list in the docstring of bfc/, with what each folder says of itself. `{way}`
draws the messages in its own text, one a line: `sender > receiver: message`, and `-- heading --`
for a line across.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from html import escape

from docutils import nodes
from docutils.parsers.rst import Directive
from layers import PACKAGE, layers_of
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

WIDTH = 860
MOST_IN_A_ROW = 4


# -- the layers ------------------------------------------------------------------------------------


def layers() -> list[list[str]]:
    """The folders of bfc/, the lowest layer first."""
    listed = layers_of(PACKAGE)
    if not listed:
        raise ExtensionError("the docstring of bfc/__init__.py lists no layers")
    return listed


def words_of(folder: str) -> str:
    """The first sentence of what a folder says of itself."""
    path = PACKAGE / folder / "__init__.py" if folder.endswith("/") else PACKAGE / folder
    said = re.match(r'\s*"""(.*?)(?:\.\s|:\n|""")', path.read_text("utf-8"), re.DOTALL)
    return " ".join(said[1].split()).rstrip(".") if said else ""


# -- drawing ---------------------------------------------------------------------------------------


def text(x: float, y: float, said: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(said)}</text>'


def svg(height: float, parts: Iterable[str], described: str) -> str:
    head = f'<svg class="drawing" viewBox="0 0 {WIDTH} {height:g}" role="img"'
    return "\n".join([f'{head} aria-label="{escape(described)}">', *parts, "</svg>"])


def draw_layers() -> str:
    """A row for each layer, the highest on top, and a box for each folder with its own words."""
    parts, y = [], 4.0
    for number, folders in reversed(list(enumerate(layers()))):
        parts.append(text(4, y + 19, str(number), "layer"))
        for start in range(0, len(folders), MOST_IN_A_ROW):
            row = folders[start : start + MOST_IN_A_ROW]
            width = (WIDTH - 34) / max(2, len(row)) - 8
            said = [wrap(words_of(folder), int((width - 18) / 6.1), max_lines=4) for folder in row]
            height = 32 + 13 * max(map(len, said))
            for index, (folder, lines) in enumerate(zip(row, said, strict=True)):
                x = 34 + index * (width + 8)
                box = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4"/>'
                parts += [box, text(x + 9, y + 18, folder, "folder")]
                parts += [
                    text(x + 9, y + 34 + 13 * i, line, "words") for i, line in enumerate(lines)
                ]
            y += height + 8
        y += 8
        if number:
            parts.append(f'<line x1="4" x2="{WIDTH - 4}" y1="{y - 8:g}" y2="{y - 8:g}"/>')
    return svg(y, parts, "The folders of bfc/ by layers; each one imports only from layers below")


def wrap(said: str, columns: int, max_lines: int) -> list[str]:
    said = said.replace("`", "")
    return textwrap.wrap(said, columns, max_lines=max_lines, placeholder=" …")


MESSAGE = re.compile(r"^(?P<sender>[\w ]+?) *> *(?P<receiver>[\w ]+?): *(?P<said>.+)$")
HEADING = re.compile(r"^-- (?P<heading>.+) --$")


def messages(lines: Iterable[str]) -> list[re.Match[str]]:
    found = []
    for line in filter(None, map(str.strip, lines)):
        match = MESSAGE.match(line) or HEADING.match(line)
        if match is None:
            raise ExtensionError(f"`sender > receiver: message` or `-- heading --`, not {line!r}")
        found.append(match)
    return found


def draw_way(lines: Iterable[str]) -> str:
    """A column for each who takes part, and a row for each message."""
    found = messages(lines)
    talks = [match.groupdict() for match in found if "said" in match.groupdict()]
    who = list(dict.fromkeys(name for talk in talks for name in (talk["sender"], talk["receiver"])))
    step = WIDTH / len(who)
    at = {name: step * (index + 0.5) for index, name in enumerate(who)}
    parts = [text(at[name], 20, name, "who") for name in who]
    y = 34.0
    for match in found:
        given = match.groupdict()
        y += 34
        if "heading" in given:
            parts.append(f'<line x1="4" x2="{WIDTH - 4}" y1="{y - 14:g}" y2="{y - 14:g}"/>')
            parts.append(text(8, y + 4, given["heading"], "heading"))
            continue
        start, end = at[given["sender"]], at[given["receiver"]]
        said = given["said"].replace("`", "")
        if start == end:
            parts.append(text(start, y - 2, said, "said"))
            parts.append(f'<circle cx="{start:g}" cy="{y + 6:g}" r="3"/>')
            continue
        way = 1 if end > start else -1
        parts.append(text((start + end) / 2, y - 2, said, "said"))
        parts.append(
            f'<line class="way" x1="{start:g}" x2="{end:g}" y1="{y + 6:g}" y2="{y + 6:g}"/>'
        )
        tip = f"{end:g},{y + 6:g} {end - 8 * way:g},{y + 2:g} {end - 8 * way:g},{y + 10:g}"
        parts.append(f'<polygon points="{tip}"/>')
    lifelines = [
        f'<line class="life" x1="{x:g}" x2="{x:g}" y1="28" y2="{y + 14:g}"/>' for x in at.values()
    ]
    return svg(y + 20, [*lifelines, *parts], "The messages of an allocation, in their order")


class Layers(Directive):  # type: ignore[misc]
    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", draw_layers(), format="html")]


class Way(Directive):  # type: ignore[misc]
    has_content = True

    def run(self) -> list[nodes.Node]:
        return [nodes.raw("", draw_way(self.content), format="html")]


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("layers", Layers)
    app.add_directive("way", Way)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
