"""Inputs of planning: load statistics, forecasts, synthetic traffic, model configs and compute-time curves."""
