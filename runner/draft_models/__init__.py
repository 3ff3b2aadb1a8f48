"""Architectures of draft heads, one file each."""
