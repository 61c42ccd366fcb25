"""Tests of the pool between hosts."""
