"""What one rank does next: the replica's state machine, and the group leader's. PURE."""
