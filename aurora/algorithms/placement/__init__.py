"""Placement of experts on GPUs, for one model or for several that share the GPUs: cost models, searches and lower bounds."""
