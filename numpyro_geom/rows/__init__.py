"""Rows of data: their order, where they are stored, and how they travel to the device."""
