"""What is sampled: a model's energy, its minibatches and changes of its variables."""
