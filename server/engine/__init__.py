"""The worker as the server sees it: start, requests, death, restart."""
