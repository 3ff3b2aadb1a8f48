"""The tensors of a step: request table, input batch, sampling parameters, KV cache and copies."""
