"""torchrec#4584."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="meta-pytorch/torchrec#4584",
    date="2026-08-18",
    observed="93 GiB are reserved for a peak of 77 GiB when embedding tables are moved out and back"
    " in each step; one arena or one empty_cache() brings it to 77.",
    reason="The sizes of the blocks and their order are in pictures and internal links only.",
    whose="thread",
)
