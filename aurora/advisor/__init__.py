"""Recommendations and comparisons that need both the planner and the simulator."""
