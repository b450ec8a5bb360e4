"""Approximate samplers and guides to compare with: none of them leaves the posterior invariant."""
