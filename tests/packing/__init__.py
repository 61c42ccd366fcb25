"""Tests of the packing room."""
