"""The threads, sockets and timers around the replica's state machine."""
