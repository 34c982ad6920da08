"""Processes on this machine: supervisor, ranks of a group, SIGTERM, and the record of a run."""
