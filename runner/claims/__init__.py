"""Tests at start-up whether attention back ends work under CUDA graphs as they claim."""
