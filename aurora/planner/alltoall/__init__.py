"""Orders of one all-to-all: by name, exact, split, on two tiers, for many matrices."""
