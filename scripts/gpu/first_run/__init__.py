"""The first run on a node: ten stages, each PASS, FAIL or SKIP, and one report. Started by scripts/gpu/first_run.sh."""
