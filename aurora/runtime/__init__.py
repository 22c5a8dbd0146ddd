"""Performs Programs: serves MoE models on ranks, with ordered dispatch and combine, and several models interleaved."""
