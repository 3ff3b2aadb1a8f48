"""Measures drafters in a live engine and keeps prompts for their training."""
