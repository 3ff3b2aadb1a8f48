"""Decides what runs in each step; owns requests and KV blocks. Pure Python, no tensors."""
