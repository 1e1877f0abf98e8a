"""What leaves the process in a watched call, or in a piece of a connector's background work: files, sockets,
databases, shared memory; and whether the KV that was read stands in it."""
