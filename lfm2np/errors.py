"""The errors of lfm2np. Each message names the thing, its value, what was expected and the source."""


class Lfm2npError(Exception):
    """Base class: the command line prints the message on one line and exits with `exit_code`."""

    exit_code = 1


class ConfigError(Lfm2npError):
    """config.json or generation_config.json is unreadable, contradictory or not LFM2."""

    exit_code = 3


class CheckpointError(Lfm2npError):
    """A weight file is missing, corrupt, or holds other tensors than the config asks for."""

    exit_code = 3


class TokenizerError(Lfm2npError):
    """tokenizer.json or the chat template is missing, corrupt or cannot do what was asked."""

    exit_code = 3


class NumericsError(Lfm2npError):
    """An operand breaks the bound under which a result is proved exact, or a value is not finite."""

    exit_code = 4


class RequestError(Lfm2npError):
    """A request asks for what cannot be: an id outside the vocabulary, an empty prompt, too many tokens."""

    exit_code = 2


class ProofError(Lfm2npError):
    """A run, or its replay, differs from what it has to equal."""

    exit_code = 1


class DumpError(Lfm2npError):
    """A file of activations is unreadable, or holds other tensors or shapes than the model has."""

    exit_code = 3


class TraceError(Lfm2npError):
    """A trace, of traffic or of a run, is unreadable, in no known format, or holds what no request can be."""

    exit_code = 3


class InconclusiveError(Lfm2npError):
    """A check ran, and what it was given does not suffice to tell."""

    exit_code = 2


class WorkerError(Lfm2npError):
    """Workers of an executor died again and again, can't be reached, or have another checkpoint."""

    exit_code = 1


def told(error: Lfm2npError) -> str:
    """As a result tells it: the kind of error, and its message."""
    return f"{type(error).__name__}: {error}"


def error_told(text: str) -> Lfm2npError:
    """The error whose `told` is this text."""
    name, _, message = text.partition(": ")
    return {kind.__name__: kind for kind in Lfm2npError.__subclasses__()}[name](message)
