"""Long runs of real processes under faults at random, and the checks that hold throughout."""
