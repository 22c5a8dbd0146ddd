"""Evaluations of papers in their own set-up, ours beside: one folder per paper, and what they share."""
