"""Planning: pure functions on arrays, each with a lower bound on its result, and the steps from profiles to a Plan."""
