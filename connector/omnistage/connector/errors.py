"""Errors of the connector, most of them about a tensor that a peer names.

ConnectorError (ValueError)
    InvalidReference    the peer sent something that can never be right
        ForeignSegment  into memory that another user holds
    StaleReference      the reference is or was right; its memory has been reused since, or cannot be mapped now

No message here ever holds the name of a shared-memory segment: the text may travel to a client.
"""


class ConnectorError(ValueError):
    """Base of all errors of the connector; raised itself if this process misuses it."""


class InvalidReference(ConnectorError):
    """A reference, part or release breaks the contract. Maps to INVALID_ARGUMENT, reason PROTOCOL; sending it again cannot help."""


class ForeignSegment(InvalidReference):
    """A reference into memory that another user could take away under a reader: it is not mapped."""


class StaleReference(ConnectorError):
    """A reference cannot be used any more: its block was freed, its producer is gone, or its reader has no descriptor or address space left
    to map it. Maps to ABORTED, reason STALE_REFERENCE; go on inline."""


class ArenaFull(Exception):
    """No block of the wanted size is free and the arena may not or cannot grow. Internal: a sender goes inline instead."""
