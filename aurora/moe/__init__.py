"""The expert-parallel MoE layer: expert map, dispatch layouts, permutation kernels, and the steps of one layer."""
