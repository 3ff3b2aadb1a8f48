"""Attention back ends. `base` defines their interface; each other file holds one implementation."""
