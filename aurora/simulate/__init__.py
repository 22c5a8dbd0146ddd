"""An event-driven interpreter of Programs: what a plan will take, before anything runs."""
