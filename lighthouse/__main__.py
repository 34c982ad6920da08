"""`python -m lighthouse`: the same as the command `lighthouse`."""

from lighthouse.cli import main

if __name__ == "__main__":
    main()
