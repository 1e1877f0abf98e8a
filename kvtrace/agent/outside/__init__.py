"""What a connector's work does outside the process: names and sizes of files, connections, amounts of bytes.
Comes in: audit events and calls of sockets. Goes out: OUTSIDE records. Nothing of the connector's is opened
here, and no byte of it is read."""
