"""Steps that Ray makes, in other processes or on other nodes."""
