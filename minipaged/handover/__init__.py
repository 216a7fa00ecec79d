"""K/V for other engines: the interface of connectors, the names of blocks, and a connector that uses a folder."""
