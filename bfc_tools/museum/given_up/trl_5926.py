"""trl#5926."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="huggingface/trl#5926",
    date="2026-06-03",
    observed="Two copies of the logits fewer save 2,758 MB of 18,289.",
    reason="The peak is that of a whole training of Qwen2.5-0.5B, whose code is not in the "
    "thread. The copies alone have 1,185 MiB.",
    whose="thread",
)
