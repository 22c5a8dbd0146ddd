"""Cases of planning: one model that has the GPUs to itself, models that share every GPU, and models on servers."""
