"""The exceptions of jaxfuse; each message states the rule, what came, and what to do."""


class JaxfuseError(ValueError):
    """Bad input from outside: a file, a folder, a flag."""


class InputError(JaxfuseError):
    """An argument that does not fit: its rule, what came, and what to do."""


class ConfigError(JaxfuseError):
    """A config.json that is damaged, or describes a model that is not implemented."""


class CheckpointError(JaxfuseError):
    """A checkpoint that is missing, damaged, or does not fit its configuration."""
