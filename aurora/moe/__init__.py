"""The expert-parallel MoE layer: expert map, dispatch layouts, permutation kernels, and the steps of one layer."""

from aurora.algorithms import uncompiled as uncompiled  # before any compiled module is imported
