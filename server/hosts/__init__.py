"""Several hosts: nodes that join the first one, and the processes of engines on them."""
