"""Finds a model's files, checks them, and reads configs and weights from them."""
