"""Methods for comparison, whose draws are not meant to be the posterior's."""
