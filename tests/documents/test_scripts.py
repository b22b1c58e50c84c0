"""The list of others' scripts says in its head what its rows say."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

LIST = Path(__file__).parents[2] / "docs" / "reference" / "scripts.md"
#: How many scripts a row is about that says so.
SEVERAL = {"both": 2, "all three": 3}


def test_the_head_of_the_list_counts_its_rows() -> None:
    counts: Counter[str] = Counter()
    text = LIST.read_text()
    for row in re.findall(r"^\| (?!repository).*\| (.*) \|$", text, re.MULTILINE):
        outcome = re.match(r"(predicted|undecided|failed|no)\b(?:, ([\w ]+):)?", row)
        assert outcome is not None, row
        counts[outcome[1]] += SEVERAL.get(outcome[2] or "", 1)
    predicted, undecided = counts["predicted"], counts["undecided"]
    decided = counts.total() - undecided
    head = " ".join(text.split("## ")[0].split())
    assert (
        f"{counts.total()} scripts with their options so far, each once, with what came of it "
        f"last: {decided} could be decided, of which {predicted} came to a prediction, and "
        f"{decided - predicted} did not; {undecided} are undecided."
    ) in head
