"""Between hosts: how ranks connect over TCP, pass entries, and know that the others are alive."""
