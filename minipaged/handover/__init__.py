"""K/V for other engines: what a connector is, how blocks are named, and a connector that keeps them in a folder."""
