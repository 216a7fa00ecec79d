"""What an engine is set up with: the settings, and parts of somebody's own."""
