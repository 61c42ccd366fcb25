"""Policies: each makes an order of works, by one rule. Pure functions of what there is to do, without torch."""
