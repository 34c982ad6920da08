"""The lighthouse's decisions: the quorums, and what becomes of each step. PURE."""
