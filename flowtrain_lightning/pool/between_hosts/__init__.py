"""The pool's ways between hosts: how ranks meet over TCP, carry entries, and know that the others are alive."""
