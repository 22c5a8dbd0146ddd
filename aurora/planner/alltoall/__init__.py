"""Orders of one all-to-all: by name, exact, split, over two tiers, for many matrices."""
