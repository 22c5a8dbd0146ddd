"""Papers' evaluations in their own set-up, ours beside: one folder a paper, and what they share."""
