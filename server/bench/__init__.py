"""The measurements of `slipstream bench`."""
