"""vllm#49151."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="vllm-project/vllm#49151",
    date="2026-07-20",
    observed="A private pool grows from 9.18 to 14.44 GiB over the captures of graphs.",
    reason="The sizes of what is captured are not in the thread.",
    whose="thread",
)
