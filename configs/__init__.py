"""The configuration: frozen dataclasses, their loader, presets. Imports no other folder of ours."""
