"""Mathematics of plans: pure functions on arrays, below everything that uses them."""

from aurora.algorithms import uncompiled as uncompiled  # before any compiled module is imported
