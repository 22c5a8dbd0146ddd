"""Orders of one all-to-all: strategies by name, Birkhoff decompositions, open-shop searches, and orders over servers."""
