"""torchft's own tests, read from an installed torchft and run on this project's names.

    python -m tests.torchft_suites manager_integ_test

`names.py` is the import adapter; `test_torchft_suites.py` says which cases must pass. What each case shows is in
docs/torchft.md. Nothing of torchft is imported but its test modules.
"""
