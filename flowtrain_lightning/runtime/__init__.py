"""Runtime: what an encoder lane and a backbone lane do during a step."""
