"""Measures drafters in a running engine, and collects prompts for their training."""
