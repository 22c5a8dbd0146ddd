"""Orders of one all-to-all: by name, exact, split, over servers, for many matrices."""
