"""Which files that rules of predictions rest on have changed between two releases of PyTorch, and
which rules are to be read again: `make upstream FROM=2.15.0 TO=2.16.0 SOURCES=pytorch.git`.

FROM and TO are tags or commits of the git directory SOURCES; without it, folders: of PyTorch's
sources, or the folder that holds an installed `torch`, which has its Python files, its headers and
the table of its functions.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import re
import subprocess
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from bfc_tools.predicting.rules.operators import AROUND, OPERATORS, Fact, Source

#: Returns the text of a file, or None where there is none.
Tree = Callable[[str], str | None]
#: So many names of operators are printed for a rule.
FEW = 4


def folder(root: Path) -> Tree:
    """The files of a folder."""
    if not root.is_dir():
        raise SystemExit(f"no such folder: {root}")

    def text(path: str) -> str | None:
        header = path.removeprefix("aten/src/")
        table = root / "torchgen" / "packaged" / header  # native_functions.yaml
        for file in (root / path, root / "torch" / "include" / header, table):
            if file.is_file():
                return file.read_text("utf-8", "replace")
        return None

    return text


def tag(git: Path, name: str) -> Tree:
    """The files of a tag or commit: "2.15.0" is v2.15.0, too."""
    asked = ["git", f"--git-dir={git}"]
    for one in (name, f"v{name}"):
        found = subprocess.run([*asked, "rev-parse", "--verify", "--quiet", f"{one}^{{commit}}"])
        if not found.returncode:
            break
    else:
        raise SystemExit(f"{git} has no tag or commit {name}, nor v{name}")

    def text(path: str) -> str | None:
        done = subprocess.run([*asked, "show", f"{one}:{path}"], capture_output=True, check=False)
        return None if done.returncode else done.stdout.decode("utf-8", "replace")

    return text


def rules_by_file() -> dict[str, dict[Fact, list[str]]]:
    """Of each file of PyTorch's what was read in it, and of which operators."""
    try:
        from bfc_tools.predicting import known_values  # noqa: F401  # which registers numbers
    except ImportError:
        print("without torch, what is known of numbers is left out")
    found: dict[str, dict[Fact, list[str]]] = {}
    facts = [(spec.name, one) for spec in OPERATORS.values() for one in spec.facts]
    for name, fact in [*facts, *(("torch itself", one) for one in AROUND.values())]:
        for source in fact.sources:
            if ": " not in source.path:  # of another project
                found.setdefault(source.path, {}).setdefault(fact, []).append(name)
    return found


def function_of(text: str, name: str) -> list[str]:
    """The bodies of the functions of a name, in C++ or Python; none if there are none."""
    if re.search(rf"^\s*(def|class) {re.escape(name)}\b", text, re.MULTILINE):
        nodes = [one for one in ast.walk(ast.parse(text)) if getattr(one, "name", "") == name]
        return [ast.get_source_segment(text, one) or "" for one in nodes]
    named = rf"(?:\b{re.escape(name)}|\bTORCH_\w+_FUNC2?\({re.escape(name)}(?:,\s*\w+)?\))"
    begins = re.finditer(rf"{named}\s*\((?:[^;{{}}]|\{{\}})*\)[^;{{}}()]*\{{", text)
    return [text[one.start() : _end(text, one.end())] for one in begins]


def _end(text: str, begin: int) -> int:
    """Behind the brace that closes what was opened before `begin`."""
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, begin):
        depth += 1 if match[0] == "{" else -1
        if not depth:
            return match.end()
    return len(text)


def functions_changed(source: Source, old: str, new: str) -> bool:
    """Whether what was read of a file has changed: its functions, or all if none are named, or
    where they are not found."""
    bodies = [(function_of(old, one), function_of(new, one)) for one in source.functions]
    return not bodies or any(not one or one != other for one, other in bodies)


def lines_changed(old: str, new: str) -> int:
    """How many lines were added or removed."""
    diff = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0)
    return sum(line[:1] in "+-" and line[:3] not in ("+++", "---") for line in diff)


def report(old: Tree, new: Tree) -> Iterator[str]:
    """What to read again: files that are gone, then those whose functions have changed."""
    files, unknown, same = rules_by_file(), 0, 0
    compiled = [path for path in files if path.endswith((".cpp", ".cu"))]
    installed = all(new(path) is None for path in compiled)  # a wheel has none of them
    gone: list[list[str]] = []
    changed: list[list[str]] = []
    beside: list[list[str]] = []
    for path, facts in sorted(files.items()):
        before, after = old(path), new(path)
        if before is None or (installed and path in compiled):
            unknown += 1
        elif after is None:
            gone.append([f"{path} is gone", *_rules(facts)])
        elif before == after:
            same += 1
        else:
            again = {
                fact: names
                for fact, names in facts.items()
                if any(
                    functions_changed(one, before, after)
                    for one in fact.sources
                    if one.path == path
                )
            }
            told = f"{path}: {lines_changed(before, after)} lines"
            (changed if again else beside).append([told, *_rules(again or facts)])
    for title, parts in (
        ("no longer there; find where this went:", gone),
        ("changed; read these rules again:", changed),
        ("changed, but not in the functions that were read:", beside),
    ):
        yield from _part(title, parts)
    yield f"{same} files are the same; {unknown} cannot be compared: one of both has none of them"


def _part(title: str, parts: Iterable[list[str]]) -> Iterator[str]:
    for part in parts:
        if title:
            yield title
            title = ""
        yield f"  {part[0]}"
        yield from part[1:]


def _rules(facts: dict[Fact, list[str]]) -> list[str]:
    """A line for each rule; one that is registered twice has one."""
    return list(dict.fromkeys(_rule(fact, names) for fact, names in facts.items()))


def _rule(fact: Fact, names: list[str]) -> str:
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    named = f"{', '.join(names[:FEW])}{more}"
    if fact.function is None:
        return f"    {named} ({fact.what})"
    return f"    {fact.function.__module__}.{fact.function.__name__}: {named}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.upstream", description=__doc__)
    parser.add_argument("old", metavar="FROM", help="a tag of SOURCES, or a folder")
    parser.add_argument("new", metavar="TO", help="the same of the newer release")
    parser.add_argument("--sources", type=Path, help="a git directory of PyTorch's")
    options = parser.parse_args()
    git = options.sources
    trees = [tag(git, one) if git else folder(Path(one)) for one in (options.old, options.new)]
    print("\n".join(report(*trees)))


if __name__ == "__main__":
    main()
