"""Errors that a user can cause: one sentence that says what is wrong and what to do."""


class PostludeError(Exception):
    """Base class of all errors that Postlude raises on purpose. The message is one sentence for the user."""


class ProblemFileError(PostludeError):
    """A problem file (`Model`, `get_inputs`, `get_init_inputs`) cannot be used as it is."""


class PrecisionError(PostludeError):
    """The precision that was asked for does not exist on this device."""
