"""From prompts to a stream of outputs, the same for every endpoint."""
