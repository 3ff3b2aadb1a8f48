"""CUDA graphs: capture, dispatch and replay; a recorder replaces them on the CPU."""
