"""Builds a model runner: loads the target, sizes the KV cache, compiles kernels and warms up."""
