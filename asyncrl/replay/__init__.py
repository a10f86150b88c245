"""The replay server and its clients: what bounds staleness, and never loses a group."""
