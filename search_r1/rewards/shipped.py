"""Importing this module registers all shipped components: one line for each module that has some."""

from __future__ import annotations

import search_r1.rewards.answer_components
import search_r1.rewards.efficiency_components
import search_r1.rewards.format_reward
import search_r1.rewards.judge
import search_r1.rewards.presets.autorefine
import search_r1.rewards.presets.r1_searcher
import search_r1.rewards.presets.research
import search_r1.rewards.semantic  # noqa: F401
