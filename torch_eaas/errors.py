"""Every exception of torch_eaas.

::

    EaasError
    |-- ConfigError (ValueError)          what a user can fix: an argument, a size, a file
    |   `-- CheckpointError               a checkpoint that is incomplete, broken or not understood
    |-- InferenceOnlyError                backward through remote experts
    |-- TurnTimeout (TimeoutError)        a micro-batch computed too long for the others
    |-- AnomalyError (ArithmeticError)    NaN or Inf, where they are looked for
    `-- TransportError (RuntimeError)     the wire
        |-- PeerTimeout (TimeoutError)    a peer did not answer in time
        |-- PeerGone                      a peer's process has ended, or it closed the pair
        |-- AccessDenied                  a monitor or server asks for another token
        |-- HandshakeRefused              a server did not accept a pair
        |-- StalePeer                     a frame of another life or epoch
        |-- RequestRefused                a server answered a request with an error
        `-- ExpertUnavailable             no live server holds an expert
"""


class EaasError(Exception):
    """The base of every error that torch_eaas raises on purpose."""


class ConfigError(EaasError, ValueError):
    """A value that the caller can correct."""


class CheckpointError(ConfigError):
    """A checkpoint that is incomplete, broken or not understood; names file and tensor."""


class InferenceOnlyError(EaasError):
    """Backward was called through remote experts, which only run forward."""


class TurnTimeout(EaasError, TimeoutError):
    """A micro-batch did not get its turn in time; names who computed, and how long."""


class AnomalyError(EaasError, ArithmeticError):
    """NaN or Inf in a layer's input or output; names layer and token."""


class TransportError(EaasError, RuntimeError):
    """Something between a client and a server failed."""


class PeerTimeout(TransportError, TimeoutError):
    """A peer did not answer within its deadline; names who waited, for whom, and how long."""


class PeerGone(TransportError):
    """A peer's process has ended, or it closed the pair."""


class AccessDenied(TransportError):
    """A monitor or server turned the caller away: its token is missing or wrong."""


class HandshakeRefused(TransportError):
    """A server did not accept the pair; the message carries its reason."""


class StalePeer(TransportError):
    """A frame or a handshake of another instance or epoch."""


class RequestRefused(TransportError):
    """A server answered a request with an error; the message carries its text."""


class ExpertUnavailable(TransportError):
    """No live server holds an expert.

    Args:
        layer: The layer that needed it.
        expert: The expert's id within the layer.
        tried: Names of the servers that were asked.
        reason: What the last of them said, or why none was asked.
    """

    def __init__(self, layer: int, expert: int, tried: tuple[str, ...], reason: str = "") -> None:
        self.layer = layer
        self.expert = expert
        self.tried = tried
        asked = f"tried {', '.join(tried)}" if tried else "no server holds it"
        tail = f": {reason}" if reason else ""
        super().__init__(f"layer {layer}, expert {expert} is unavailable ({asked}){tail}")
