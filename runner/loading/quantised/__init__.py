"""Reads quantised matrices of checkpoints into `kernels.quant.packed.PackedWeight`, one format a
file."""
