"""CUDA graphs: capture, dispatch and replay."""
