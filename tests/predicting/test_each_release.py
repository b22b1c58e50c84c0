"""What programs are predicted to need under each release stays as `make predicted` wrote it.

A change of a rule is meant to show there: write the file anew, and say in the change what differs.
"""

from __future__ import annotations

import pytest

from bench import predicted

HEAD, *ROWS = predicted.written()

pytestmark = pytest.mark.skipif(
    predicted.head() != HEAD, reason="the figures are of the operators of another PyTorch"
)


def test_the_rules_of_the_oldest_and_the_newest_release_say_what_is_written() -> None:
    names = predicted.releases()
    for release in (names[0], names[-1]):
        said = [row for row in ROWS if row[1:3] == ("h100", release) and row[0] in predicted.SMALL]
        assert list(predicted.small(release, ["h100"])) == said


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # of programs as they are
@pytest.mark.parametrize("release", predicted.releases())
def test_each_release_says_what_is_written(release: str) -> None:
    said = [row for row in ROWS if row[2] == release]
    assert [*predicted.small(release), *predicted.larger(release)] == said
