"""What the runner provides for drafters with a model: weights, attention, graphs, swaps."""
