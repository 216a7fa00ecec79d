"""From a model's name to its weights: where they come from, how they are read, what shape they have."""
