"""Attention back ends behind one interface: `base` has it, one file an implementation."""
