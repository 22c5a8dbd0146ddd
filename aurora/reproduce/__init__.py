"""Papers' evaluations in their own set-up, ours beside: one file a paper, and what it needs."""
