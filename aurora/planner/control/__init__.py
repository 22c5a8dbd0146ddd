"""Control of a placement in force: what the next window's loads will be, and whether a change of slots is worth its moves."""
