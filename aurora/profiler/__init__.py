"""Measures how models route tokens and how long their phases take here."""
