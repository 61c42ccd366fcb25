"""A model that sees and hears: drawings and tones, made on the spot, whose names it learns."""
