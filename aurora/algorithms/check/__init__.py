"""Checkers: replay plans, schedules and placements from first principles. They call no planner."""
