"""vllm#52054."""

from bfc_tools.museum.case import GivenUp

GIVEN_UP = GivenUp(
    source="vllm-project/vllm#52054",
    date="2026-08-12",
    observed="The log-probabilities of 8,192 prompt tokens are said to take about 7.5 GB.",
    reason="The figure was computed, not measured, from logits in bfloat16 and their log-softmax "
    "in single precision. PyTorch casts bfloat16 before it, which makes it 12.5 GB.",
    whose="thread",
)
