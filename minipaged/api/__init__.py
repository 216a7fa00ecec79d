"""What the front doors take: prompts, and vLLM's arguments with the reason why some mean nothing here."""
