"""From the placement in force to the next one: relabelling, what moves, what it costs, and recovery after failures."""
