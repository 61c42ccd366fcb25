"""Features of frozen encoders, kept in a folder."""
