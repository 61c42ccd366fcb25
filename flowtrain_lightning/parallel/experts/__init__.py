"""Mixtures of experts, whole or divided among ranks."""
