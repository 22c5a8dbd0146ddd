"""Inputs of planning: load statistics, drift, synthetic traffic, model configs and compute-time curves."""
