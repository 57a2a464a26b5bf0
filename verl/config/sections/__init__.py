"""The settings of a run as typed fields, one file for each section of the YAML tree."""
