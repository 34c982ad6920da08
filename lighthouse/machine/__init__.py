"""The lighthouse's decisions: which members form a quorum, and what becomes of each step. PURE."""
