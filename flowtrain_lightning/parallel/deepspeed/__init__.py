"""A half under DeepSpeed ZeRO."""
