#!/usr/bin/env bash
# Train PPO, GRPO, EMA-PG (published and corrected gradient), RLOO and REINFORCE++ on TinyWiki with three seeds each and
# compare them: a table and a figure. Finished runs are kept, so the same command continues after an interruption.
#   bash scripts/experiments/compare_algorithms.sh [--seeds 3,4,5] [--jobs 2] [--output_dir DIR] [--steps N] [--publish]
# --publish copies table and figure to docs/results/; --dry_run only checks the settings and says what is finished.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

bash scripts/setup.sh
exec .venv/bin/python scripts/experiments/grid.py scripts/experiments/algorithms.yaml "$@"
