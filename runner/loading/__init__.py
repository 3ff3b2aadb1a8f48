"""Finds model files and reads configs and weights from them."""
