"""A recipe: a frozen language model with trained queries tells a generator what to draw."""
