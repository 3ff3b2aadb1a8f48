"""The page /live: a chat that shows which tokens were drafted, and charts of the server."""
