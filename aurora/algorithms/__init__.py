"""Mathematics of plans: pure functions on arrays, below everything that uses them."""
