"""Tests of the allocator room."""
