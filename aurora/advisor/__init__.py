"""Decisions that need both the planner and the simulator."""
