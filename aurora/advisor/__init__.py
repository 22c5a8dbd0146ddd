"""Decisions that need the planner and the simulator together."""
