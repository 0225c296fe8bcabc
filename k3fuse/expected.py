"""What a step is expected to touch when the data decides: routed experts."""

from __future__ import annotations


def expected_distinct_experts(num_experts: int, top_k: int, batch: int) -> float:
    """Experts of one layer that a batch touches when every row picks `top_k` at random.

    E * (1 - (1 - k/E)^B): 16 of 896 at batch 1, 120.3 at batch 8. Real routing is less even, so
    this is an upper estimate.
    """
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** batch)
