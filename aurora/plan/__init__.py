"""The mathematics of planning: pure functions on arrays, each with its bound."""
