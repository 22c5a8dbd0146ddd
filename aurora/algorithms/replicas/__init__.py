"""Replication: how many replicas each expert has, which GPUs or nodes hold them, and how its load is split over them."""
