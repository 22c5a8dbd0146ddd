"""Ports, links and cuts: bounds on an all-to-all, and the switch that times it."""
