"""What travels between lighthouse and members: messages, their encoding, addresses. PURE."""
