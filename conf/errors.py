"""The error of a configuration that cannot be run."""


class ConfigError(ValueError):
    """A value, or a combination of values, is impossible. The message quotes key, value and what would be right.

    Scripts print it without a traceback and exit with code 2, before anything has been started.
    """
