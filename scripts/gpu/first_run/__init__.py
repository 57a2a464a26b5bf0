"""The first run on a node: stages that PASS, FAIL or SKIP, and one report. Started by scripts/gpu/first_run.sh."""
