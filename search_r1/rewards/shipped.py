"""Importing this module registers all shipped components: one line for each module that has some."""

from __future__ import annotations

import search_r1.rewards.answer_components
import search_r1.rewards.efficiency_components
import search_r1.rewards.format_components
import search_r1.rewards.judge
import search_r1.rewards.r1_searcher_components
import search_r1.rewards.refine_components
import search_r1.rewards.research_format
import search_r1.rewards.semantic  # noqa: F401
