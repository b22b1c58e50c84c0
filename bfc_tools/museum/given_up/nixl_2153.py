"""nixl#2153."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="ai-dynamo/nixl#2153",
    date="2026-08-24",
    observed="record_stream during a capture keeps 424 MiB for each layer of experts.",
    reason="The sizes of the tensors that are exchanged are not in the thread.",
    whose="thread",
)
