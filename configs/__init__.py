"""Configuration: frozen dataclasses, their loader, presets. Imports nothing else of ours."""
