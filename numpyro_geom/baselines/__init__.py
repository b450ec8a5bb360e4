"""Approximate samplers and guides for comparison: none leaves the posterior invariant."""
