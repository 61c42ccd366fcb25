"""Recipes: whole trainings to run, read and copy."""
