"""Decides what runs in each step, and owns requests and KV blocks. Pure Python, no tensors."""
