"""Model architectures, one file each, draft heads included."""
