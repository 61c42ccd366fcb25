"""What can go wrong while profiling, in sentences for the user."""


class ProfileError(ValueError):
    """A profile cannot be made, read or written; the message says what to do."""
