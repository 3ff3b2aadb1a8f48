"""CUDA graphs: capture, dispatch and replay; on the CPU a recorder takes their place."""
