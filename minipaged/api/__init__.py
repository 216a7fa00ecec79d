"""The arguments of `LLM` and its like: prompts, and vLLM's arguments, with the reason why some are refused here."""
