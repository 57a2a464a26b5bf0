"""Runs that are planned without their GPUs: dry run, planner, and the preflight command."""
