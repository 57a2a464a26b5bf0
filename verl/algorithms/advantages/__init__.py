"""Advantage estimators, one a file, found by name in `ADVANTAGES`: what each policy token is worth.

Policy tokens are the true positions of `AdvantageInput.mask_T`. Every estimator picks them out first, so nothing
outside them (NaN included) reaches a result, and a row without policy tokens takes no part in any mean, count or std.

Shape letters: `T` tokens of all rows one after the other, `N` the policy tokens (or those of the GAE chain) among them,
`B` rows; after `policy_rows`, `B` counts only the rows that have policy tokens.
"""

from __future__ import annotations

# Imported for what they register.
from verl.algorithms.advantages import gae as gae
from verl.algorithms.advantages import grpo as grpo
from verl.algorithms.advantages import grpo_turns as grpo_turns
from verl.algorithms.advantages import opo as opo
from verl.algorithms.advantages import reinforce as reinforce
from verl.algorithms.advantages import reinforce_plus_plus as reinforce_plus_plus
from verl.algorithms.advantages import reinforce_plus_plus_baseline as reinforce_plus_plus_baseline
from verl.algorithms.advantages import remax as remax
from verl.algorithms.advantages import rloo as rloo
from verl.algorithms.advantages.inputs import ADVANTAGES as ADVANTAGES
from verl.algorithms.advantages.inputs import EPSILON as EPSILON
from verl.algorithms.advantages.inputs import AdvantageInput as AdvantageInput
from verl.algorithms.advantages.inputs import Advantages as Advantages
from verl.algorithms.advantages.inputs import AdvantageSettings as AdvantageSettings
from verl.algorithms.advantages.rows import batch_divisor as batch_divisor
