"""The number formats of a model's weights, and linear layers whose weights are quantised."""
