"""The sampled target: energies of models and functions, and wrappers Potential -> Potential."""
