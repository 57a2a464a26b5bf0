"""Validation of a reward's coefficients."""

from __future__ import annotations


def check_shares(**scores: float) -> None:
    """Raises `ValueError` unless each is in [0, 1]."""
    for name, value in scores.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is {value}: give a number from 0 to 1, the reward of a correct answer")
