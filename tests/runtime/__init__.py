"""Tests of the runtime room."""
