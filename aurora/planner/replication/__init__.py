"""How many replicas each expert has, where they are, and how its load divides over them."""
