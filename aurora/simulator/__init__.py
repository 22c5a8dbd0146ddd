"""Event-driven interpreter of Programs: predicts what a plan takes before anything runs."""
