"""The setup of an LLM: its settings, a user's own parts, the loaded model, and the sizes that were left open."""
