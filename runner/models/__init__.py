"""Model architectures, one file per family, and the layers that they share."""
