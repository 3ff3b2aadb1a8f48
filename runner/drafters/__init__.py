"""What drafters with a model of their own get: weights, KV memory, attention, graphs."""
