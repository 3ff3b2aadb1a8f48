"""Computes tokens and log probabilities from logits."""
