"""Starts the server process and makes its HTTP application."""
