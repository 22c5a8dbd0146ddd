"""Placement of experts on GPUs, for one model or for two colocated models: cost models, searches and lower bounds."""
