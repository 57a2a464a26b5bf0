"""How many requests an online engine received, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Usage:
    """Counts since the start. `answered` counts the engine's HTTP 200 replies, which are what it charges for.

    `refused` counts the queries that it did not take for their length or content.
    """

    queries: int = 0
    cache_hits: int = 0
    attempts: int = 0
    answered: int = 0
    failed: int = 0
    refused: int = 0
    price_per_1000: float = 0.0

    @property
    def cost(self) -> float:
        """Money spent, in the currency of the price."""
        return self.answered * self.price_per_1000 / 1000

    def __str__(self) -> str:
        return (
            f"{self.queries} queries, {self.cache_hits} from the cache, {self.attempts} attempts, "
            f"{self.answered} answered, {self.failed} failed, {self.refused} refused, cost {self.cost:.4f}"
        )
