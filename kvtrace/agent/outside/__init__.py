"""What a connector's work does outside the process: files, connections, amounts of bytes.

Comes in: audit events and calls of sockets.
Goes out: OUTSIDE records.
May not: open what is the connector's, or read a byte of it.
"""
