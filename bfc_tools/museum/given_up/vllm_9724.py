"""vllm#9724."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="vllm-project/vllm#9724",
    date="2024-10-26",
    observed="Graphs of four sizes share a pool, and what they return is kept; with weak "
    "references the pool takes only the largest.",
    reason="The script is there, but what it printed is cut off in the text that was read.",
    whose="thread",
)
