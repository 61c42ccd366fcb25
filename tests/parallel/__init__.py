"""Tests of the parallel room."""
