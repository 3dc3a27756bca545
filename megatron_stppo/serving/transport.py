"""Authenticated, encrypted messages between the trainer's first rank and the first ranks of the replicas.

The trainer has a Listener (a zmq ROUTER), each replica a Dialer (a DEALER), with CURVE. A connection is a
peer: a Dialer does not connect again after its connection has ended, because messages may have been lost with
it. The replica then ends, or starts over with a new Dialer and a new Hello.

Both send a sign of life every BEAT seconds from the thread that owns the socket, so that a long computation
in the caller's thread does not look like a crash, unless it holds Python's interpreter lock all that time.
"""

from megatron_stppo.serving.dialer import Dialer
from megatron_stppo.serving.listener import Listener
from megatron_stppo.serving.payloads import BEAT, Unreadable

__all__ = ["BEAT", "Dialer", "Listener", "Unreadable"]
