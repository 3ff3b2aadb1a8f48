"""One step on the device: gather, forward, sample, draft."""
