"""Control of a placement in force: predicts the next loads, and decides whether a change of slots is worth its moves."""
