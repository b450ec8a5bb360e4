"""A NumPyro model with its arguments, and its energy."""
