"""Decides which data-parallel rank a request goes to, and in which steps prompts are computed."""
