"""The mathematics of planning: pure functions on arrays, each with its bound, and the wiring from profiles to a Plan."""
