"""Further architectures, one file each; the registry imports them when they are needed."""
