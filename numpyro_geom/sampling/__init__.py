"""How a chain moves, for every algorithm."""
