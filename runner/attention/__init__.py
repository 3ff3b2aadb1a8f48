"""Attention back ends behind one interface; `base` has the interface, one file an implementation."""
