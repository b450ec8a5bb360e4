"""What is sampled: energies of models and functions, and the wrappers Potential -> Potential."""
