"""cosmos-rl#388."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="nvidia-cosmos/cosmos-rl#388",
    date="2025-11-17",
    observed="expandable_segments lowers what is reserved from 126.97 to 96.61 GB at 60.9 GB "
    "allocated.",
    reason="The sizes and the order of the requests are not in the thread.",
    whose="thread",
)
