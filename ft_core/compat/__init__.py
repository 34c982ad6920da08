"""Other libraries' names and signatures on this one's classes, for scripts that were written for them."""
