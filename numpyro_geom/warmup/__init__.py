"""What a chain learns before its draws count: where to start, the step size, the anchor."""
