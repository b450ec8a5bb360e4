"""Rows of data: which come next, where they are, and how they travel to the device."""
