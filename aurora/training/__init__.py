"""Training of transformers MoE models: ranks share each global batch, and each rank holds the experts of its slots."""
