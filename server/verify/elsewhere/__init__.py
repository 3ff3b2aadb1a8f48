"""The checks of servers that run elsewhere, by HTTP alone."""
