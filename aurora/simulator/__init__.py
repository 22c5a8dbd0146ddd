"""Event-driven interpreter of Programs: predicts the times of a plan before anything runs."""
